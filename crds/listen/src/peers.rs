//! How many connections each peer has. The rule is pure.
//!
//! One that opens all it can shall not keep all others out. Many clients may come from one address, behind a load balancer
//! or from a gateway, so what an address may have is a large part of all there is, and not a small number.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Bounds;

/// One place in so many is kept for peers that have few connections.
const KEPT_PART: usize = 8;

/// Open connections by peer; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Peers(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// Why a peer has no more connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It has its part of them.
    Part { most: usize },
    /// The last ones are for those who have few.
    Kept { open: usize, kept: usize, own: usize, few: usize },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Part { most } => write!(f, "this address has {most} connections, which is the limit per peer"),
            Self::Kept { open, kept, own, few } => write!(
                f,
                "{open} connections are open, the last {kept} are kept for addresses with fewer than {few}, and this one has {own}"
            ),
        }
    }
}

/// One connection of a peer, until it is dropped.
#[derive(Debug)]
pub struct Held {
    peers: Peers,
    peer: IpAddr,
}

impl Peers {
    /// One more connection of this peer, if it may have it.
    ///
    /// # Errors
    /// If it may not.
    pub fn hold(&self, peer: IpAddr, bounds: Bounds) -> Result<Held, Refused> {
        let mut counts = self.counts();
        let open = counts.values().sum();
        let own = counts.get(&peer).copied().unwrap_or(0);
        one_more(own, open, bounds)?;
        counts.insert(peer, own + 1);
        Ok(Held { peers: self.clone(), peer })
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        // Counting cannot fail half way, so a poisoned lock still guards whole counts.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut counts = self.peers.counts();
        let own = counts.get(&self.peer).map_or(0, |own| own.saturating_sub(1));
        if own == 0 {
            counts.remove(&self.peer);
        } else {
            counts.insert(self.peer, own);
        }
    }
}

/// Whether a peer that has `own` of the `open` connections may have one more: no peer has more than its part, and the last
/// places are for those who have few, so that some peers together cannot take what one needs.
fn one_more(own: usize, open: usize, bounds: Bounds) -> Result<(), Refused> {
    let most = bounds.connections_per_peer;
    let kept = bounds.connections / KEPT_PART;
    let few = (kept / KEPT_PART).max(1);
    if own >= most {
        Err(Refused::Part { most })
    } else if open >= bounds.connections - kept && own >= few {
        Err(Refused::Kept { open, kept, own, few })
    } else {
        Ok(())
    }
}

/// Who has this address. A host has a whole network of 64 bits of the public IPv6 addresses, and one address of the others.
pub fn peer_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(long) if !long.is_unique_local() => {
            IpAddr::V6(Ipv6Addr::from_bits(long.to_bits() & (u128::MAX << 64)))
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Has a peer connect as often as it can; how often that was.
    fn fill(peers: &Peers, peer: u8, bounds: Bounds, held: &mut Vec<Held>) -> usize {
        let before = held.len();
        // Who connects has a place already: there are no more than these.
        while held.len() < bounds.connections
            && let Ok(one) = peers.hold(IpAddr::from([10, 0, 0, peer]), bounds)
        {
            held.push(one);
        }
        held.len() - before
    }

    #[test]
    fn no_peer_and_no_few_peers_keep_the_others_out() {
        for (connections, each, expected) in [
            (4096, None, [2048, 1536, 64, 64]),
            (256, None, [128, 96, 4, 4]),
            // Too few to keep any.
            (4, None, [2, 2, 0, 0]),
            (1, None, [1, 0, 0, 0]),
            // Where all come from one address, it may have all but those that are kept.
            (4096, Some(4096), [3584, 64, 64, 64]),
            (4096, Some(10), [10, 10, 10, 10]),
        ] {
            let mut bounds = Bounds::of_clients(connections, Duration::ZERO, Duration::ZERO);
            bounds.connections_per_peer = each.unwrap_or(bounds.connections_per_peer);
            let (peers, mut held) = (Peers::default(), Vec::new());
            let got = [1, 2, 3, 4].map(|peer| fill(&peers, peer, bounds, &mut held));
            assert_eq!(got, expected, "{connections} {each:?}");
            drop(held);
            assert_eq!(fill(&peers, 9, bounds, &mut Vec::new()), expected[0], "all were given back");
        }
    }

    #[test]
    fn a_refusal_names_its_limit_and_both_values() {
        let refused = |own, open| one_more(own, open, Bounds::PROBES).unwrap_err().to_string();
        assert_eq!(refused(128, 200), "this address has 128 connections, which is the limit per peer");
        let kept =
            "224 connections are open, the last 32 are kept for addresses with fewer than 4, and this one has 100";
        assert_eq!(refused(100, 224), kept);
    }

    #[test]
    fn a_host_is_one_peer() {
        let peer = |address: &str| peer_of(address.parse().unwrap()).to_string();
        assert_eq!(peer("10.1.2.3"), "10.1.2.3");
        assert_eq!(peer("::ffff:10.1.2.3"), "10.1.2.3");
        assert_eq!(peer("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(peer("fd00:1:2:3:4:5:6:7"), "fd00:1:2:3:4:5:6:7");
    }
}
