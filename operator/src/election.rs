//! One operator of several acts: the one that holds a Lease.
//!
//! The holder renews three times per lease duration and stops being leader by its own clock before another may take
//! over by its. Clocks need not agree: what counts is how long ago a change of the Lease was seen here.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};

/// Name of the Lease.
pub const LEASE: &str = "lorafleet-operator";
const DURATION_S: i32 = 10;
const RENEW_EVERY: Duration = Duration::from_secs(3);
const GIVE_UP_AFTER: Duration = Duration::from_secs(7);
const RETRY_EVERY: Duration = Duration::from_secs(1);
/// The longest wait for a holder that does not renew, whatever its lease says.
const WAIT_MAX_S: i32 = 60;

/// One candidate and the Lease.
pub struct Election {
    leases: Api<Lease>,
    candidate: Candidate,
}

/// What a candidate knows of the Lease, and what it may do with it. Pure.
struct Candidate {
    identity: String,
    /// Holder and time of its renewal as last seen, and when that was first seen here.
    seen: Option<(String, Instant)>,
}

impl Election {
    pub fn new(client: Client, namespace: &str, identity: String) -> Self {
        Self { leases: Api::namespaced(client, namespace), candidate: Candidate { identity, seen: None } }
    }

    /// Returns once this operator is the leader: when it asked, which is what its time counts from.
    pub async fn win(&mut self) -> Instant {
        loop {
            let asked = Instant::now();
            match tokio::time::timeout(GIVE_UP_AFTER, self.try_once()).await {
                Ok(Ok(Claimed::Mine)) => return asked,
                Ok(Ok(Claimed::Anothers | Claimed::Changed)) => {}
                Ok(Err(error)) => tracing::warn!(%error, "asking for the lease"),
                Err(_) => tracing::warn!("asking for the lease timed out"),
            }
            tokio::time::sleep(RETRY_EVERY).await;
        }
    }

    /// Renews what was asked for at `renewed` for as long as it can; returns when this operator must no longer act.
    pub async fn hold(&mut self, mut renewed: Instant) {
        while renewed.elapsed() < GIVE_UP_AFTER {
            tokio::time::sleep(if renewed.elapsed() < RENEW_EVERY { RENEW_EVERY } else { RETRY_EVERY }).await;
            let left = GIVE_UP_AFTER.saturating_sub(renewed.elapsed());
            // The others count from when the renewal was written, which is some time before its answer is here.
            let asked = Instant::now();
            match tokio::time::timeout(left, self.try_once()).await {
                Ok(Ok(Claimed::Mine)) => renewed = asked,
                Ok(Ok(Claimed::Anothers)) => return,
                // The next look shows who it was: perhaps nobody who wants to lead.
                Ok(Ok(Claimed::Changed)) => tracing::warn!("somebody else has written to the lease"),
                Ok(Err(error)) => tracing::warn!(%error, "renewing the lease"),
                Err(_) => tracing::warn!("renewing the lease timed out"),
            }
        }
    }

    /// Lets the next one take over at once.
    pub async fn release(&self) -> kube::Result<()> {
        let Some(mut lease) = self.leases.get_opt(LEASE).await? else { return Ok(()) };
        let Some(spec) =
            lease.spec.as_mut().filter(|spec| spec.holder_identity.as_ref() == Some(&self.candidate.identity))
        else {
            return Ok(());
        };
        spec.holder_identity = None;
        self.leases.replace(LEASE, &PostParams::default(), &lease).await.map(drop)
    }

    /// Takes or renews the lease if that is allowed now.
    async fn try_once(&mut self) -> kube::Result<Claimed> {
        let found = self.leases.get_opt(LEASE).await?;
        let Some(lease) = found else {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() },
                spec: Some(self.candidate.claim(None, Timestamp::now())),
            };
            return won(self.leases.create(&PostParams::default(), &lease).await);
        };
        if !self.candidate.may_take(lease.spec.as_ref(), Instant::now()) {
            return Ok(Claimed::Anothers);
        }
        let spec = Some(self.candidate.claim(lease.spec.as_ref(), Timestamp::now()));
        won(self.leases.replace(LEASE, &PostParams::default(), &Lease { spec, ..lease }).await)
    }
}

impl Candidate {
    /// Whether it may make the Lease its own: nobody's, its own already, or not renewed for as long as its holder said, or for as
    /// long as anybody is waited for.
    fn may_take(&mut self, spec: Option<&LeaseSpec>, now: Instant) -> bool {
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
        if holder.is_empty() || holder == self.identity {
            return true;
        }
        let renewed = spec.and_then(|spec| spec.renew_time.as_ref()).map_or(0, |time| time.0.as_microsecond());
        let state = format!("{holder} {renewed}");
        match &self.seen {
            Some((known, since)) if *known == state => {
                let seconds = spec.and_then(|spec| spec.lease_duration_seconds).unwrap_or(DURATION_S);
                // Neither shorter than any operator needs, nor for ever: the lease may be left by something else.
                let seconds = u64::try_from(seconds.clamp(DURATION_S, WAIT_MAX_S)).unwrap_or_default();
                now.saturating_duration_since(*since) > Duration::from_secs(seconds)
            }
            known => {
                let same = known.as_ref().is_some_and(|(known, _)| known.starts_with(&format!("{holder} ")));
                if !same {
                    tracing::info!(holder, "the lease is held by another; waiting");
                }
                self.seen = Some((state, now));
                false
            }
        }
    }

    /// The Lease as it makes it, from what it was before.
    fn claim(&self, before: Option<&LeaseSpec>, now: Timestamp) -> LeaseSpec {
        let now = MicroTime(now);
        let mine = before.is_some_and(|spec| spec.holder_identity.as_ref() == Some(&self.identity));
        let transitions = before.and_then(|spec| spec.lease_transitions).unwrap_or_default();
        let acquired = before.and_then(|spec| spec.acquire_time.clone()).filter(|_| mine);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(DURATION_S),
            acquire_time: acquired.or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(if mine { transitions } else { transitions.saturating_add(1) }),
            ..LeaseSpec::default()
        }
    }
}

/// What came of asking for the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claimed {
    Mine,
    Anothers,
    /// Somebody has written to it between the look and the claim.
    Changed,
}

fn won(written: kube::Result<Lease>) -> kube::Result<Claimed> {
    match written {
        Ok(_) => Ok(Claimed::Mine),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(Claimed::Changed),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex};

    use axum::Json;
    use axum::http::StatusCode;

    use super::*;

    /// Held by `holder`, renewed at this second of its own clock.
    fn held(holder: &str, renewed_s: i64) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(holder.to_owned()).filter(|holder| !holder.is_empty()),
            lease_duration_seconds: Some(DURATION_S),
            renew_time: Some(MicroTime(Timestamp::from_second(renewed_s).unwrap())),
            lease_transitions: Some(4),
            ..LeaseSpec::default()
        }
    }

    /// Second of its own clock, what is found, and whether it may be taken.
    type Look = (u64, Option<LeaseSpec>, bool);

    /// One candidate's looks: seconds on its own clock, what it finds, and whether it may take it. The other's clock is an
    /// hour behind, which must not count.
    #[test]
    fn a_lease_is_taken_when_it_was_not_renewed_for_as_long_as_it_says() {
        let saying = |seconds| LeaseSpec { lease_duration_seconds: Some(seconds), ..held("other", 0) };
        let cases: [(&str, &[Look]); 9] = [
            (
                "said to be held for days",
                &[
                    (0, Some(saying(1_000_000)), false),
                    (60, Some(saying(1_000_000)), false),
                    (61, Some(saying(1_000_000)), true),
                ],
            ),
            (
                "said to be held for less than no time",
                &[(0, Some(saying(-1)), false), (10, Some(saying(-1)), false), (11, Some(saying(-1)), true)],
            ),
            ("none yet", &[(0, None, true)]),
            ("released", &[(0, Some(held("", 0)), true)]),
            ("its own", &[(0, Some(held("me", 0)), true), (99, Some(held("me", 0)), true)]),
            (
                "renewed",
                &[
                    (0, Some(held("other", 0)), false),
                    (8, Some(held("other", 8)), false),
                    (17, Some(held("other", 8)), false),
                ],
            ),
            (
                "silent",
                &[
                    (0, Some(held("other", 0)), false),
                    (10, Some(held("other", 0)), false),
                    (11, Some(held("other", 0)), true),
                ],
            ),
            (
                "silent after a renewal",
                &[
                    (0, Some(held("other", 0)), false),
                    (9, Some(held("other", 3)), false),
                    (19, Some(held("other", 3)), false),
                    (20, Some(held("other", 3)), true),
                ],
            ),
            (
                "a third one was faster",
                &[
                    (0, Some(held("other", 0)), false),
                    (11, Some(held("third", 0)), false),
                    (21, Some(held("third", 0)), false),
                    (22, Some(held("third", 0)), true),
                ],
            ),
        ];
        let start = Instant::now();
        for (case, looks) in cases {
            let mut candidate = Candidate { identity: "me".to_owned(), seen: None };
            for (second, spec, expected) in looks {
                let may = candidate.may_take(spec.as_ref(), start + Duration::from_secs(*second));
                assert_eq!(may, *expected, "{case}, second {second}");
            }
        }
    }

    /// An API server that has this Lease, keeps nothing, and answers claims with these codes, one after the other, and then takes
    /// all.
    async fn api(holder: &str, codes: &[u16]) -> (Api<Lease>, Arc<Mutex<Vec<Instant>>>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked: Arc<Mutex<Vec<Instant>>> = Arc::default();
        let lease = Lease {
            metadata: ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() },
            spec: Some(held(holder, 0)),
        };
        let (times, codes, same) =
            (asked.clone(), Arc::new(Mutex::new(VecDeque::from(codes.to_vec()))), Json(lease.clone()));
        let look = move || async move { same };
        let claim = move || {
            times.lock().unwrap().push(Instant::now());
            let code = codes.lock().unwrap().pop_front().unwrap_or(200);
            let answer = match code {
                200 => serde_json::to_value(&lease),
                _ => serde_json::to_value(kube::core::Status::failure("no", "Conflict").with_code(code)),
            };
            async move { (StatusCode::from_u16(code).unwrap(), Json(answer.unwrap())) }
        };
        let path = format!("/apis/coordination.k8s.io/v1/namespaces/demo/leases/{LEASE}");
        let server = axum::Router::new().route(&path, axum::routing::get(look).put(claim));
        tokio::spawn(async move { axum::serve(listener, server).await });
        let client = Client::try_from(kube::Config::new(url.parse().unwrap())).unwrap();
        (Api::namespaced(client, "demo"), asked)
    }

    #[tokio::test]
    async fn a_lease_that_somebody_writes_to_is_looked_at_once_more() {
        for (holder, codes, expected) in
            [("me", &[409][..], &[Claimed::Changed, Claimed::Mine][..]), ("other", &[], &[Claimed::Anothers])]
        {
            let (leases, _) = api(holder, codes).await;
            let mut election = Election { leases, candidate: Candidate { identity: "me".to_owned(), seen: None } };
            for expected in expected {
                assert_eq!(election.try_once().await.unwrap(), *expected, "{holder}");
            }
        }
    }

    #[tokio::test]
    async fn the_time_of_a_leader_counts_from_when_it_asked() {
        let (leases, asked) = api("me", &[409]).await;
        let mut election = Election { leases, candidate: Candidate { identity: "me".to_owned(), seen: None } };
        let since = election.win().await;
        let asked = asked.lock().unwrap().clone();
        assert!(asked[0] < since && Some(&since) <= asked.last(), "{since:?} of {asked:?}");
    }

    #[test]
    fn a_holder_stops_before_another_may_begin() {
        // It is sure for the last time when it has asked; the other counts from when it has seen the answer's time.
        assert!(GIVE_UP_AFTER < Duration::from_secs(DURATION_S as u64));
        assert!(RENEW_EVERY + RETRY_EVERY < GIVE_UP_AFTER, "one failed renewal is not the end");
    }

    #[test]
    fn a_claim_counts_changes_of_the_holder_and_keeps_when_it_began() {
        let candidate = Candidate { identity: "me".to_owned(), seen: None };
        let at = |second| Timestamp::from_second(second).unwrap();
        let taken = candidate.claim(Some(&held("other", 0)), at(50));
        assert_eq!((taken.holder_identity.as_deref(), taken.lease_transitions), (Some("me"), Some(5)));
        assert_eq!(
            (taken.acquire_time.clone(), taken.renew_time.clone()),
            (Some(MicroTime(at(50))), Some(MicroTime(at(50))))
        );
        let renewed = candidate.claim(Some(&taken), at(53));
        assert_eq!(renewed.lease_transitions, Some(5));
        assert_eq!((renewed.acquire_time, renewed.renew_time), (Some(MicroTime(at(50))), Some(MicroTime(at(53)))));
        assert_eq!(candidate.claim(None, at(1)).lease_transitions, Some(1));
    }
}
