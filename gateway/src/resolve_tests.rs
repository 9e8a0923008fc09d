use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::{AdapterState, Load, Role, Tier};
use proptest::prelude::*;

use super::*;
use crate::view::{Holding, Holdings, PodReport, PodView};

/// A digest whose first seven bytes are `start`, so that several share their first 12 hex digits.
fn digest(start: u8, last: u8) -> Digest {
    let mut bytes = [start; 32];
    bytes[31] = last;
    Digest::from_bytes(bytes)
}

fn pod(aliases: &[(&str, Digest)], held: &[(&str, Digest, AdapterState)]) -> PodView {
    let aliases = aliases.iter().map(|(name, digest)| ((*name).to_owned(), *digest)).collect();
    let mut holdings = Holdings { aliases, ..Holdings::default() };
    for (name, digest, state) in held {
        holdings.adapters.entry((*name).to_owned()).or_default().push(Holding {
            digest: *digest,
            state: *state,
            tier: Tier::Device,
            bytes: 1,
            last_error: None,
        });
    }
    PodView {
        address: SocketAddr::from(([10, 88, 0, 2], 8000)),
        ready: true,
        report: Some(Arc::new(PodReport {
            received_ms: 0,
            outstanding_then: 0,
            boot_id: "boot".to_owned(),
            draining: false,
            role: Role::Shared,
            load: Load::default(),
            base_digest: digest(0xbb, 0),
            holdings: Arc::new(holdings),
        })),
        poll_error: None,
    }
}

fn obstacle(refused: bool, reason: &str, message: &str) -> Option<Obstacle> {
    Some(Obstacle { refused, reason: reason.to_owned(), message: message.to_owned() })
}

/// Pool `demo/` with base `smollm2`: `support` at a1.. (a1..01 still held), `twins` with two versions of one prefix,
/// `refused`, `fresh`, and `team-b/pirate` from another namespace, known from the pods alone.
fn view() -> FleetView {
    let adapter = |current: Option<Digest>| AdapterView { current, ..AdapterView::default() };
    let adapters = BTreeMap::from([
        ("support".to_owned(), adapter(Some(digest(0xa1, 0)))),
        ("twins".to_owned(), AdapterView { others: vec![digest(0xd0, 2)], ..adapter(Some(digest(0xd0, 1))) }),
        (
            "refused".to_owned(),
            AdapterView { obstacle: obstacle(true, "RankTooHigh", "rank 64 is above 16"), ..adapter(None) },
        ),
        ("fresh".to_owned(), adapter(None)),
        ("busy".to_owned(), AdapterView { obstacle: obstacle(false, "Verifying", "3 of 9 MB read"), ..adapter(None) }),
        ("smollm2".to_owned(), adapter(Some(digest(0xee, 0)))),
    ]);
    let (c1, c2) = (digest(0xc1, 0), digest(0xc2, 0));
    let pods = [
        pod(&[("team-b/pirate", c1)], &[("support", digest(0xb7, 0), AdapterState::Ready)]),
        pod(&[("team-b/pirate", c2)], &[("team-b/pirate", c1, AdapterState::Ready)]),
        pod(&[("team-b/pirate", c2)], &[("support", digest(0xf9, 0), AdapterState::Failed)]),
    ];
    FleetView {
        namespace: "demo".to_owned(),
        base: "smollm2".to_owned(),
        base_digest: None,
        base_created_unix_s: 0,
        adapters: Arc::new(adapters),
        pods: pods.into_iter().enumerate().map(|(index, pod)| (format!("pod-{index}"), pod)).collect(),
    }
}

fn check(permitted: &Permitted, cases: &[(&str, &str)]) {
    let view = view();
    for (model, expected) in cases {
        let got = match resolve(&view, permitted, model) {
            Ok(target) => target.to_string(),
            Err(error) => format!("{}: {error}", format!("{error:?}").split([' ', '{']).next().unwrap_or_default()),
        };
        assert_eq!(&got, expected, "model {model:?}");
    }
}

#[test]
fn names_lead_to_versions() {
    let a1 = digest(0xa1, 0).hex();
    check(
        &Permitted::All,
        &[
            ("", "base 'smollm2'"),
            ("smollm2", "base 'smollm2'"),
            ("demo/smollm2", "adapter 'smollm2@eeeeeeeeeeee'"),
            ("support", "adapter 'support@a1a1a1a1a1a1'"),
            ("demo/support", "adapter 'support@a1a1a1a1a1a1'"),
            ("support@a1a1a1a1a1a1", "adapter 'support@a1a1a1a1a1a1'"),
            (&format!("support@{a1}"), "adapter 'support@a1a1a1a1a1a1'"),
            (&format!("demo/support@sha256:{a1}"), "adapter 'support@a1a1a1a1a1a1'"),
            // Held by a pod although the object no longer names it: a request may still finish a conversation on it.
            ("support@b7b7b7b7b7b7", "adapter 'support@b7b7b7b7b7b7'"),
            ("team-b/pirate", "adapter 'team-b/pirate@c2c2c2c2c2c2'"),
            ("team-b/pirate@c1c1c1c1c1c1", "adapter 'team-b/pirate@c1c1c1c1c1c1'"),
        ],
    );
}

#[test]
fn names_that_lead_nowhere_say_why() {
    let unknown = |model: &str| format!("Unknown: the model '{model}' does not exist or this key may not use it");
    let version = "'support' has no version whose digest starts with";
    let digits = "a version is written as 12 to 64 lower-case hex digits";
    check(
        &Permitted::All,
        &[
            ("nobody", &unknown("nobody")),
            ("nobody@a1a1a1a1a1a1", &unknown("nobody@a1a1a1a1a1a1")),
            ("other/support", &unknown("other/support")),
            ("demo/demo/support", &unknown("demo/demo/support")),
            ("../support", &unknown("../support")),
            ("@", &unknown("@")),
            ("demo/", &unknown("demo/")),
            (
                "smollm2@bbbbbbbbbbbb",
                "UnknownVersion: 'smollm2' has no version whose digest starts with 'bbbbbbbbbbbb'",
            ),
            ("support@000000000000", &format!("UnknownVersion: {version} '000000000000'")),
            // Failed to load everywhere: that digest answers nobody.
            ("support@f9f9f9f9f9f9", &format!("UnknownVersion: {version} 'f9f9f9f9f9f9'")),
            ("support@a1", &format!("BadVersion: 'support@a1': {digits}")),
            ("support@A1A1A1A1A1A1", &format!("BadVersion: 'support@A1A1A1A1A1A1': {digits}")),
            (
                "twins@d0d0d0d0d0d0",
                &format!(
                    "Ambiguous: 'twins@d0d0d0d0d0d0' is ambiguous: it is the start of {} and {}",
                    digest(0xd0, 1),
                    digest(0xd0, 2)
                ),
            ),
            ("refused", "Refused: the adapter 'refused' is refused (RankTooHigh): rank 64 is above 16"),
            ("busy", "NotServedYet: the adapter 'busy' is not served yet (Verifying): 3 of 9 MB read"),
            (
                "fresh",
                "NotServedYet: the adapter 'fresh' is not served yet: the operator has not verified and placed it",
            ),
        ],
    );
}

#[test]
fn a_key_sees_only_its_models() {
    let only = Permitted::Only(["support", "team-b/pirate"].map(str::to_owned).into());
    let unknown = |model: &str| format!("Unknown: the model '{model}' does not exist or this key may not use it");
    check(
        &only,
        &[
            ("support", "adapter 'support@a1a1a1a1a1a1'"),
            ("demo/support@a1a1a1a1a1a1", "adapter 'support@a1a1a1a1a1a1'"),
            ("team-b/pirate", "adapter 'team-b/pirate@c2c2c2c2c2c2'"),
            ("smollm2", &unknown("smollm2")),
            ("", &unknown("")),
            ("twins@d0d0d0d0d0d0", &unknown("twins@d0d0d0d0d0d0")),
            ("refused", &unknown("refused")),
            ("nobody", &unknown("nobody")),
        ],
    );
}

#[test]
fn a_gateway_that_has_not_seen_its_pool_knows_no_base() {
    let empty = FleetView { namespace: "demo".to_owned(), ..FleetView::default() };
    for model in ["", "smollm2", "demo/"] {
        assert!(matches!(resolve(&empty, &Permitted::All, model), Err(ResolveError::Unknown { .. })), "{model:?}");
    }
}

proptest! {
    /// Whatever is asked: no panic, and an answer names an adapter only if the key lists it.
    #[test]
    fn nothing_leads_past_a_key(model in "(demo/|team-b/|)(support|twins|refused|smollm2|pirate|)(@|)(sha256:|)[a-f0-9]{0,14}|.{0,600}") {
        let only = Permitted::Only(["twins".to_owned()].into());
        match resolve(&view(), &only, &model) {
            Ok(target) => prop_assert_eq!(target.name(), "twins"),
            Err(ResolveError::Unknown { .. }) => {}
            Err(error) => prop_assert!(error.to_string().contains("twins"), "{}", error),
        }
    }

    /// The wire name of what was found finds the same again, whatever the aliases then mean.
    #[test]
    fn the_wire_name_is_a_fixed_point(model in "(demo/|)(support|twins|smollm2|team-b/pirate)") {
        let mut view = view();
        let Ok(target) = resolve(&view, &Permitted::All, &model) else { return Ok(()) };
        let Some(wire) = target.wire_model() else { return Ok(()) };
        let mut adapters = (*view.adapters).clone();
        for adapter in adapters.values_mut() {
            adapter.others.extend(adapter.current.replace(digest(0x77, 7)));
        }
        view.adapters = Arc::new(adapters);
        prop_assert_eq!(resolve(&view, &Permitted::All, &wire), Ok(target));
    }
}
