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

/// The Lease as one candidate sees it.
pub struct Election {
    leases: Api<Lease>,
    identity: String,
    /// Holder and number of renewals as last seen, and when that was first seen here.
    seen: Option<(String, Instant)>,
}

impl Election {
    pub fn new(client: Client, namespace: &str, identity: String) -> Self {
        Self { leases: Api::namespaced(client, namespace), identity, seen: None }
    }

    /// Returns once this operator is the leader.
    pub async fn win(&mut self) {
        loop {
            match self.try_once().await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "asking for the lease"),
            }
            tokio::time::sleep(RETRY_EVERY).await;
        }
    }

    /// Renews for as long as it can; returns when this operator must no longer act.
    pub async fn hold(&mut self) {
        let mut renewed = Instant::now();
        while renewed.elapsed() < GIVE_UP_AFTER {
            tokio::time::sleep(if renewed.elapsed() < RENEW_EVERY { RENEW_EVERY } else { RETRY_EVERY }).await;
            let left = GIVE_UP_AFTER.saturating_sub(renewed.elapsed());
            match tokio::time::timeout(left, self.try_once()).await {
                Ok(Ok(true)) => renewed = Instant::now(),
                Ok(Ok(false)) => return,
                Ok(Err(error)) => tracing::warn!(%error, "renewing the lease"),
                Err(_) => tracing::warn!("renewing the lease timed out"),
            }
        }
    }

    /// Lets the next one take over at once.
    pub async fn release(&self) -> kube::Result<()> {
        let Some(mut lease) = self.leases.get_opt(LEASE).await? else { return Ok(()) };
        let Some(spec) = lease.spec.as_mut().filter(|spec| spec.holder_identity.as_ref() == Some(&self.identity))
        else {
            return Ok(());
        };
        spec.holder_identity = None;
        self.leases.replace(LEASE, &PostParams::default(), &lease).await.map(drop)
    }

    /// Takes or renews the lease if that is allowed now. A conflict with another candidate means: not the leader.
    async fn try_once(&mut self) -> kube::Result<bool> {
        let found = self.leases.get_opt(LEASE).await?;
        let Some(lease) = found else {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() },
                spec: Some(self.claim(None)),
            };
            return won(self.leases.create(&PostParams::default(), &lease).await);
        };
        if !self.may_take(lease.spec.as_ref()) {
            return Ok(false);
        }
        let spec = Some(self.claim(lease.spec.as_ref()));
        won(self.leases.replace(LEASE, &PostParams::default(), &Lease { spec, ..lease }).await)
    }

    fn may_take(&mut self, spec: Option<&LeaseSpec>) -> bool {
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
        if holder.is_empty() || holder == self.identity {
            return true;
        }
        let renewed = spec.and_then(|spec| spec.renew_time.as_ref()).map_or(0, |time| time.0.as_microsecond());
        let state = format!("{holder} {renewed}");
        match &self.seen {
            Some((known, since)) if *known == state => {
                let seconds = spec.and_then(|spec| spec.lease_duration_seconds).unwrap_or(DURATION_S);
                since.elapsed() > Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
            }
            _ => {
                self.seen = Some((state, Instant::now()));
                false
            }
        }
    }

    fn claim(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
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

fn won(written: kube::Result<Lease>) -> kube::Result<bool> {
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}
