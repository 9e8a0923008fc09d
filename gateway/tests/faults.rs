//! Pods that fail: before their answer another pod is tried, within it the client is told.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use futures::StreamExt as _;
use lorafleet_artifact::Digest;
use lorafleet_gateway::view::FleetView;

#[tokio::test]
async fn another_pod_is_tried_before_the_first_byte() {
    for (cause, first) in [
        ("Connect", dead_pod().await),
        ("Unavailable", pod(Behaviour::Status(503)).await),
        ("Conflict", pod(Behaviour::Status(409)).await),
        ("Denied", pod(Behaviour::Status(401)).await),
        ("Busy", pod(Behaviour::Status(429)).await),
        ("NotHeld", pod(Behaviour::NotHeld).await),
        ("Unavailable", pod(Behaviour::Status(404)).await),
    ] {
        let echo = pod(Behaviour::Echo).await;
        let front = front(&[&first, &echo], limits(&[])).await;
        assert_eq!(front.chat(r#"{"model":"support"}"#).await.status(), 200, "{cause}");
        assert_eq!(echo.seen.count(), 1);
        let retried = front.metric(&format!("lorafleet_gateway_retries_total{{cause=\"{cause}\"}}"));
        assert_eq!(retried.as_deref(), Some("1"), "{cause}");
    }
}

#[tokio::test]
async fn a_pods_other_answers_are_final() {
    for status in [400, 422, 500, 502] {
        let first = pod(Behaviour::Status(status)).await;
        let echo = pod(Behaviour::Echo).await;
        let front = front(&[&first, &echo], limits(&[])).await;
        let response = front.chat(r#"{"model":"support"}"#).await;
        assert_eq!(response.headers()["retry-after"], "7");
        assert_eq!(error_of(response).await, (status, format!("Told{status}"), "as told".to_owned()));
        assert_eq!(echo.seen.count(), 0, "{status}");
    }
}

#[tokio::test]
async fn when_all_fail_the_last_word_is_passed_on() {
    let unavailable = pod(Behaviour::Status(503)).await;
    let dead = dead_pod().await;
    let front_503 = front(&[&dead, &unavailable], limits(&[])).await;
    let (status, code, _) = error_of(front_503.chat(r#"{"model":"support"}"#).await).await;
    assert_eq!((status, code.as_str()), (503, "Told503"));

    let front_dead = front(&[&dead], limits(&[])).await;
    let response = front_dead.chat(r#"{"model":"support"}"#).await;
    assert_eq!(response.headers()["retry-after"], "1");
    let (status, code, message) = error_of(response).await;
    assert_eq!((status, code.as_str()), (503, "EngineUnreachable"));
    assert!(message.starts_with("pod p0 cannot be connected to: "), "{message}");
}

#[tokio::test]
async fn a_pod_that_is_full_is_the_last_word_of_a_pool_that_is() {
    for others in [Behaviour::Status(429), Behaviour::NotHeld] {
        let (busy, other) = (pod(Behaviour::Status(429)).await, pod(others).await);
        let front = front(&[&busy, &other], limits(&[])).await;
        let response = front.chat(r#"{"model":"support"}"#).await;
        assert_eq!(response.headers()["retry-after"], "7");
        assert_eq!(error_of(response).await.1, "Told429");
        assert_eq!((busy.seen.count(), other.seen.count()), (1, 1));
    }
}

/// Each pod has dropped it since its last report: that it does not exist would be untrue.
#[tokio::test]
async fn an_adapter_that_all_pods_have_lost_is_not_unknown() {
    let pods = [pod(Behaviour::NotHeld).await, pod(Behaviour::NotHeld).await];
    let front = front(&[&pods[0], &pods[1]], limits(&[])).await;
    // What the pods say when they are asked again.
    let lost = |mut view: FleetView| {
        for pod in view.pods.values_mut() {
            let mut report = (**pod.report.as_ref().unwrap()).clone();
            report.holdings = Arc::default();
            pod.report = Some(Arc::new(report));
        }
        view
    };
    let (response, ()) = tokio::join!(front.chat(r#"{"model":"support"}"#), say(&front.gateway.fleet, lost));
    assert_eq!(response.headers()["retry-after"], "2");
    let message = "adapter 'support@a1a1a1a1a1a1' is ready on no pod (p0: not placed there; p1: not placed there)";
    assert_eq!(error_of(response).await, (503, "AdapterNotReady".to_owned(), message.to_owned()));
    assert_eq!(pods.map(|pod| pod.seen.count()), [1, 1]);
}

#[tokio::test]
async fn an_adapter_that_was_deleted_on_the_way_is_unknown() {
    let dropped = pod(Behaviour::NotHeld).await;
    let front = front(&[&dropped], limits(&[])).await;
    let deleted = |view| FleetView { adapters: Arc::default(), ..view };
    let (response, ()) = tokio::join!(front.chat(r#"{"model":"support"}"#), say(&front.gateway.fleet, deleted));
    assert_eq!(dropped.seen.count(), 1);
    let (status, code, _) = error_of(response).await;
    assert_eq!((status, code.as_str()), (404, "ModelNotFound"));
}

#[tokio::test]
async fn a_pod_that_refuses_the_gateways_key_is_no_fault_of_the_client() {
    let denying = pod(Behaviour::Status(401)).await;
    let front = front(&[&denying], limits(&[])).await;
    let error = error_of(front.chat(r#"{"model":"support"}"#).await).await;
    assert_eq!(error, (503, "EngineUnreachable".to_owned(), "pod p0 does not take the gateway's key".to_owned()));
}

#[tokio::test]
async fn a_name_that_moves_on_the_way_is_asked_for_again() {
    let old = pod(Behaviour::NotHeld).await;
    let new = pod(Behaviour::Echo).await;
    let front = front(&[&old], limits(&[])).await;
    let moved = Digest::from_bytes([0xc2; 32]);
    let request = async { front.chat(r#"{"model":"support"}"#).await.status().as_u16() };
    let moved_on = |_| {
        let mut view = view(&[&new], &front.gateway.fleet);
        let mut adapters = (*view.adapters).clone();
        adapters.get_mut("support").unwrap().current = Some(moved);
        view.adapters = Arc::new(adapters);
        let mut report = (**view.pods["p0"].report.as_ref().unwrap()).clone();
        Arc::make_mut(&mut report.holdings).adapters.get_mut("support").unwrap()[0].digest = moved;
        view.pods.get_mut("p0").unwrap().report = Some(Arc::new(report));
        view
    };
    let (status, ()) = tokio::join!(request, say(&front.gateway.fleet, moved_on));
    assert_eq!((status, old.seen.count(), new.seen.count()), (200, 1, 1));
    assert!(new.seen.last_body().contains(&moved.hex()));
}

#[tokio::test]
async fn pods_are_asked_again_before_an_adapter_is_refused_and_all_who_wait_wait_for_the_same() {
    let echo = pod(Behaviour::Echo).await;
    let (front, heard) = unheard(&echo).await;
    let fleet = front.gateway.fleet.clone();
    // A round that began before the question says nothing.
    let earlier = fleet.begin_round();
    let ask = async || front.chat(r#"{"model":"support"}"#).await.status().as_u16();
    let hear = async {
        until("both are under way", || front.gateway.in_flight.by_model().get("support") == Some(&2)).await;
        fleet.wanted().await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let unheard = (*fleet.view()).clone();
        fleet.publish(unheard, earlier);
        let round = fleet.begin_round();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(echo.seen.count(), 0);
        fleet.publish(heard, round);
        tokio::time::timeout(Duration::from_millis(200), fleet.wanted()).await.is_err()
    };
    let (first, second, nobody_else) = tokio::join!(ask(), ask(), hear);
    assert_eq!((first, second, echo.seen.count(), nobody_else), (200, 200, 2, true));
}

#[tokio::test]
async fn what_no_pod_holds_when_asked_is_refused_at_once() {
    let echo = pod(Behaviour::Echo).await;
    let (front, _) = unheard(&echo).await;
    let asked = async { tokio::join!(front.chat(r#"{"model":"support"}"#), say(&front.gateway.fleet, |view| view)) };
    // Who waited for more than the round would wait for as long as a hearing may last.
    let (answer, ()) = tokio::time::timeout(PATIENCE / 2, asked).await.expect("it waited for more than the round");
    assert_eq!(error_of(answer).await.1, "AdapterNotReady");
}

#[tokio::test]
async fn the_number_of_attempts_is_bounded() {
    let pods =
        [pod(Behaviour::Status(503)).await, pod(Behaviour::Status(503)).await, pod(Behaviour::Status(503)).await];
    let front = front(&pods.iter().collect::<Vec<_>>(), limits(&["--max-attempts=2"])).await;
    assert_eq!(front.chat(r#"{"model":"support"}"#).await.status(), 503);
    assert_eq!(pods.iter().map(|pod| pod.seen.count()).sum::<usize>(), 2);
}

#[tokio::test]
async fn a_pod_that_dies_in_a_stream_ends_it_with_an_error_event() {
    let dying = pod(Behaviour::DieInStream).await;
    let echo = pod(Behaviour::Echo).await;
    let front = front(&[&dying, &echo], limits(&[])).await;
    let response = front.chat(r#"{"model":"support","stream":true}"#).await;
    assert_eq!(response.status(), 200);
    let text = response.text().await.unwrap();
    let error = text.strip_prefix(EVENT).unwrap_or_else(|| panic!("{text}"));
    let error: serde_json::Value = serde_json::from_str(error.trim().strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "EngineLost");
    assert_eq!(error["error"]["type"], "server_error");
    assert!(!text.contains("[DONE]") && echo.seen.count() == 0);
}

#[tokio::test]
async fn a_stream_that_ends_early_without_a_fault_is_one_that_died() {
    let early = pod(Behaviour::Text("data: {\"choices\":[{}]}\n\n")).await;
    let front = front(&[&early], limits(&[])).await;
    let text = front.chat(r#"{"model":"support","stream":true}"#).await.text().await.unwrap();
    assert!(text.contains("ended its answer before [DONE]") && text.contains("EngineLost"), "{text}");
}

#[tokio::test]
async fn an_engine_that_says_itself_why_it_ends_is_not_spoken_for() {
    let said = "data: {\"choices\":[{}]}\n\ndata: {\"error\":{\"message\":\"m\",\"code\":\"NotFinite\"}}\n\n";
    let front = front(&[&pod(Behaviour::Text(said)).await], limits(&[])).await;
    assert_eq!(front.chat(r#"{"model":"support","stream":true}"#).await.text().await.unwrap(), said);
}

#[tokio::test]
async fn a_pod_that_dies_in_an_answer_is_a_typed_error() {
    let dying = pod(Behaviour::DieInAnswer).await;
    let front = front(&[&dying], limits(&[])).await;
    let (status, code, _) = error_of(front.chat(r#"{"model":"support"}"#).await).await;
    assert_eq!((status, code.as_str()), (502, "EngineLost"));
}

#[tokio::test]
async fn a_pod_that_falls_silent_is_given_up() {
    let stalling = pod(Behaviour::Stall).await;
    let front_stall = front(&[&stalling], limits(&["--silence-timeout-seconds=0.2"])).await;
    let text = front_stall.chat(r#"{"model":"support","stream":true}"#).await.text().await.unwrap();
    // On a machine that is slow enough it is given up before its first event.
    let end = text.strip_prefix(EVENT).unwrap_or(&text);
    assert!(end.starts_with("data: {\"error\"") && end.contains("EngineTimeout"), "{text}");

    let silent = pod(Behaviour::Silent).await;
    let front_silent = front(&[&silent], limits(&["--answer-timeout-seconds=0.2"])).await;
    let (status, code, _) = error_of(front_silent.chat(r#"{"model":"support"}"#).await).await;
    assert_eq!((status, code.as_str()), (504, "EngineTimeout"));
}

#[tokio::test]
async fn known_but_ready_nowhere_says_why() {
    let echo = pod(Behaviour::Echo).await;
    let front = front(&[&echo], limits(&[])).await;
    let mut view = view(&[&echo], &front.gateway.fleet);
    view.pods.get_mut("p0").unwrap().ready = false;
    front.gateway.fleet.publish(view, 0);
    let (response, ()) = tokio::join!(front.chat(r#"{"model":"support"}"#), say(&front.gateway.fleet, |view| view));
    assert_eq!(response.headers()["retry-after"], "2");
    assert_eq!(
        error_of(response).await,
        (
            503,
            "AdapterNotReady".to_owned(),
            "adapter 'support@a1a1a1a1a1a1' is ready on no pod (p0: the pod is not ready)".to_owned()
        )
    );
    assert_eq!(error_of(front.chat(r#"{"model":"smollm2"}"#).await).await.1, "BaseNotReady");
    assert_eq!(echo.seen.count(), 0);
}

#[tokio::test]
async fn a_stop_lets_streams_end_and_cuts_those_that_do_not() {
    let stalling = pod(Behaviour::Stall).await;
    let front = front(&[&stalling], limits(&[])).await;
    let mut chunks = front.chat(r#"{"model":"support","stream":true}"#).await.bytes_stream();
    assert_eq!(chunks.next().await.unwrap().unwrap(), EVENT);
    front.drain.cancel();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!front.serving.is_finished(), "the stream was not waited for");
    // Refused, unless another process has got the port by now.
    let other = reqwest::Client::builder().timeout(Duration::from_secs(1)).build().unwrap();
    let _ = other.get(front.url("/v1/models")).send().await;
    assert_eq!(
        front.metric("lorafleet_gateway_client_connections").as_deref(),
        Some("1"),
        "a new connection was taken"
    );
    front.gateway.stop.cancel();
    let rest = chunks.next().await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&rest).contains("Draining"), "{rest:?}");
    assert!(chunks.next().await.is_none());
    tokio::time::timeout(PATIENCE, front.serving).await.unwrap().unwrap();
}

/// Whatever a request waits for when the time to drain is over, its client is told.
#[tokio::test]
async fn a_stop_answers_those_who_wait_for_an_answer() {
    let [silent, stalling] = [pod(Behaviour::Silent).await, pod(Behaviour::StallInAnswer).await];
    for (pod, body) in [
        (&silent, r#"{"model":"support"}"#),
        (&silent, r#"{"model":"support","stream":true}"#),
        (&stalling, r#"{"model":"support"}"#),
    ] {
        let front = front(&[pod], limits(&["--max-concurrent=1", "--queue-timeout-seconds=600"])).await;
        let asked = pod.seen.count();
        let stop = async {
            until("the pod is asked", || pod.seen.count() == asked + 1).await;
            until("the other one waits", || front.gateway.in_flight.queued() == 1).await;
            front.gateway.stop.cancel();
        };
        let (first, second, ()) = tokio::join!(front.chat(body), front.chat(body), stop);
        for answer in [first, second] {
            assert_eq!(answer.headers()["retry-after"], "1");
            let error = (503, "Draining".to_owned(), "the gateway stops and this request has had its time".to_owned());
            assert_eq!(error_of(answer).await, error);
        }
        let ended = "lorafleet_gateway_requests_total{model=\"support\",outcome=\"Draining\",status=\"503\"}";
        assert_eq!(front.metric(ended).as_deref(), Some("1"));
        assert_eq!(front.metric("lorafleet_gateway_refused_total{code=\"Draining\"}").as_deref(), Some("2"));
    }
}
