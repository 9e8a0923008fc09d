use axum::http::StatusCode;
use axum::routing::{get, post};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;

/// Longer than anything takes on the slowest of machines.
const PATIENCE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);

/// A client that has sent this already.
async fn client(first: &str, bounds: Bounds) -> (DuplexStream, JoinHandle<()>) {
    let (mut client, server) = duplex(64 << 10);
    client.write_all(first.as_bytes()).await.unwrap();
    let refuse = || async { (StatusCode::PAYLOAD_TOO_LARGE, "too large") };
    let routes = Router::new().route("/", get(|| async { "ok" })).route("/", post(refuse));
    (client, tokio::spawn(converse(server, routes, bounds, CancellationToken::new())))
}

async fn all_of(client: &mut DuplexStream) -> String {
    let mut answer = String::new();
    timeout(PATIENCE, client.read_to_string(&mut answer)).await.expect("it ends").unwrap();
    answer
}

/// A head that has begun does not earn its client the time of one who has asked something before.
#[tokio::test]
async fn a_first_head_has_little_time() {
    let bounds = Bounds { first_head_time: Duration::from_millis(100), ..Bounds::of_clients(4, HOUR, HOUR) };
    let (mut client, serving) = client("GET / HTTP/1.1\r\nhost:", bounds).await;
    assert_eq!(all_of(&mut client).await, "");
    serving.await.unwrap();
}

/// Who has asked something has more time for the next.
#[tokio::test]
async fn a_next_head_has_the_time_of_an_idle_connection() {
    // The slower the machine, the longer the first takes.
    for first_ms in [100, 1_000, 10_000] {
        let first_head_time = Duration::from_millis(first_ms);
        let bounds = Bounds { first_head_time, ..Bounds::of_clients(4, HOUR, HOUR) };
        let (mut client, serving) = client("GET / HTTP/1.1\r\nhost: x\r\n\r\n", bounds).await;
        let mut answer = [0; 15];
        if timeout(PATIENCE, client.read_exact(&mut answer)).await.expect("it ends").is_ok() {
            assert_eq!(&answer, b"HTTP/1.1 200 OK");
            sleep(first_head_time * 2).await;
            assert!(!serving.is_finished(), "it was closed");
            return;
        }
    }
    panic!("a request had no answer");
}

/// Else a client that sends all before it reads would see a broken connection, and never why.
#[tokio::test]
async fn who_is_refused_while_sending_may_send_the_rest_and_hears_why() {
    let body = vec![b'x'; 1 << 20];
    // The time for the rest is short: on a slow machine one attempt may not be enough.
    for _ in 0..5 {
        let head = format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
        let (mut client, serving) =
            client(&head, Bounds { first_head_time: HOUR, ..Bounds::of_clients(4, HOUR, HOUR) }).await;
        if client.write_all(&body).await.is_ok() {
            let answer = all_of(&mut client).await;
            assert!(answer.starts_with("HTTP/1.1 413 ") && answer.ends_with("too large"), "{answer}");
            drop(client);
            timeout(PATIENCE, serving).await.expect("the end is seen").unwrap();
            return;
        }
    }
    panic!("the connection broke while the client was sending");
}
