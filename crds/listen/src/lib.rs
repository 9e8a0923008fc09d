//! Accepting connections with a limit on each of their phases and on those of one peer, and ending them in order; and the
//! room for their bodies.

mod connection;
mod peers;
mod room;
mod told;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use connection::{converse, dismiss};
use peers::{Peers, Refused, peer_of};
pub use room::{Full, NotReceived, Price, Received, Room, Share, receive};
pub use told::{End, Heard, Told};

/// Time between two lines of the log about connections that are refused.
const QUIET: Duration = Duration::from_secs(10);
/// Connections that are being refused at once; of more nobody is told why.
const DISMISSALS_MAX: usize = 64;

/// What clients may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Connections that are open at once.
    pub connections: usize,
    /// Those of one peer among them.
    pub connections_per_peer: usize,
    /// Time until the head of the next request has come whole, and so the age of an idle connection. Longer than
    /// clients of ours keep one idle, or they would write into connections that are being closed.
    pub head_time: Duration,
    /// The same for the first head of a connection: who has just connected has something to say.
    pub first_head_time: Duration,
    /// Time in which the client takes no byte.
    pub write_time: Duration,
}

impl Bounds {
    /// For probes and scrapers: few, and gone soon, so that who opens many and says nothing keeps them out for a moment only.
    pub const PROBES: Self = Self {
        connections: 256,
        connections_per_peer: 128,
        head_time: Duration::from_secs(5),
        first_head_time: Duration::from_secs(5),
        write_time: Duration::from_secs(5),
    };

    /// For those who ask for answers. One peer may have half of the connections.
    pub fn of_clients(connections: usize, head_time: Duration, write_time: Duration) -> Self {
        Self {
            connections,
            connections_per_peer: connections.div_ceil(2),
            head_time,
            first_head_time: head_time.min(Duration::from_secs(10)),
            write_time,
        }
    }
}

/// What becomes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Opened,
    Closed,
    /// Its peer has as many as one may have.
    Refused,
}

/// Serves `routes` until `drain`; then takes no more connections, lets each end its request, and returns when all have.
/// `changed` hears of connections that come and go.
pub async fn serve(
    listener: TcpListener,
    routes: Router,
    bounds: Bounds,
    changed: impl Fn(Change) + Clone + Send + 'static,
    drain: CancellationToken,
) {
    let connections = TaskTracker::new();
    let places = Arc::new(Semaphore::new(bounds.connections.min(Semaphore::MAX_PERMITS)));
    let (peers, mut dismissals) = (Peers::default(), Dismissals::new());
    loop {
        // Without a place nothing is accepted: the rest waits in the kernel's queue, which is bounded.
        let accepted = tokio::select! {
            () = drain.cancelled() => break,
            accepted = accept(&listener, &places) => accepted,
        };
        let Some((stream, peer, place)) = accepted else {
            continue;
        };
        let held = match peers.hold(peer, bounds) {
            Ok(held) => held,
            Err(refused) => {
                dismissals.dismiss(stream, peer, refused, &connections);
                changed(Change::Refused);
                continue;
            }
        };
        let conversation = converse(stream, routes.clone(), bounds, drain.clone());
        let changed = changed.clone();
        connections.spawn(async move {
            // In this order, so that whoever gets the place finds it counted as free.
            let _until_its_end = (held, place);
            changed(Change::Opened);
            conversation.await;
            changed(Change::Closed);
        });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn accept(listener: &TcpListener, places: &Arc<Semaphore>) -> Option<(TcpStream, IpAddr, OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, address)) => {
            // Each event of a stream shall leave at once.
            let _ = stream.set_nodelay(true);
            Some((stream, peer_of(address.ip()), place))
        }
        Err(error) => {
            tracing::warn!(%error, "a connection could not be accepted");
            // Out of file descriptors, most likely: others must end first.
            sleep(Duration::from_millis(100)).await;
            None
        }
    }
}

/// Connections that are being refused.
struct Dismissals {
    turns: Arc<Semaphore>,
    logged: Option<Instant>,
}

impl Dismissals {
    fn new() -> Self {
        Self { turns: Arc::new(Semaphore::new(DISMISSALS_MAX)), logged: None }
    }

    /// Keeps nobody else waiting: of those who find no turn the connection is reset.
    fn dismiss(&mut self, stream: TcpStream, peer: IpAddr, refused: Refused, connections: &TaskTracker) {
        if self.logged.is_none_or(|logged| logged.elapsed() >= QUIET) {
            self.logged = Some(Instant::now());
            tracing::warn!(%peer, %refused, "a connection is refused, and perhaps more");
        }
        if let Ok(turn) = Arc::clone(&self.turns).try_acquire_owned() {
            connections.spawn(async move {
                dismiss(stream, refusal(refused).as_bytes()).await;
                drop(turn);
            });
        }
    }
}

fn refusal(refused: Refused) -> String {
    let body = format!(r#"{{"error":{{"message":"{refused}","type":"rate_limit_error","param":null,"code":"Busy"}}}}"#);
    let head =
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close";
    format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpSocket;
    use tokio::time::timeout;

    use super::*;

    /// Longer than anything takes on the slowest of machines.
    const PATIENCE: Duration = Duration::from_secs(60);
    const HOUR: Duration = Duration::from_secs(3_600);

    async fn listener() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").await.unwrap()
    }

    fn routes() -> Router {
        Router::new().route("/", get(|| async { "ok" }))
    }

    /// A connection from one of the addresses that a machine has for itself.
    async fn connect(from: [u8; 4], listener: std::net::SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((IpAddr::from(from), 0).into()).unwrap();
        socket.connect(listener).await.unwrap()
    }

    async fn ask(mut client: TcpStream) -> String {
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        timeout(PATIENCE, client.read_to_string(&mut answer)).await.expect("an answer").unwrap();
        answer
    }

    /// A client of the greedy peer that sends all before it reads. It has little time: on a slow machine one attempt may not
    /// be enough.
    async fn sends_all_and_hears_why(listener: std::net::SocketAddr) -> bool {
        let body = vec![b'x'; 1 << 20];
        for _ in 0..5 {
            let mut client = connect([127, 0, 0, 2], listener).await;
            let head = format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
            let sent = client.write_all(head.as_bytes()).await.is_ok() && client.write_all(&body).await.is_ok();
            let mut answer = String::new();
            let read = timeout(PATIENCE, client.read_to_string(&mut answer)).await.expect("an end");
            if sent && read.is_ok() && answer.starts_with("HTTP/1.1 429 ") {
                return true;
            }
        }
        false
    }

    /// Who opens connections and says nothing loses them, and those who wait behind him are served.
    #[tokio::test]
    async fn half_open_connections_give_their_places_to_others() {
        let listener = listener().await;
        let address = listener.local_addr().unwrap();
        let bounds = Bounds {
            connections: 4,
            connections_per_peer: 4,
            head_time: Duration::from_millis(300),
            first_head_time: Duration::from_millis(300),
            ..Bounds::PROBES
        };
        let drain = CancellationToken::new();
        let serving = tokio::spawn(serve(listener, routes(), bounds, |_| (), drain.clone()));
        let mut silent = Vec::new();
        for _ in 0..20 {
            let mut client = TcpStream::connect(address).await.unwrap();
            // It may have been closed already.
            let _ = client.write_all(b"GET / HTTP/1.1\r\nhost:").await;
            silent.push(client);
        }
        // The slower the machine, the more often also he who speaks comes too late.
        let begun = Instant::now();
        loop {
            let mut probe = TcpStream::connect(address).await.unwrap();
            let _ = probe.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
            let mut answer = String::new();
            let _ = timeout(PATIENCE, probe.read_to_string(&mut answer)).await.expect("an end");
            if answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("ok") {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "{answer:?}");
        }
        drain.cancel();
        timeout(PATIENCE, serving).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_peer_that_opens_all_it_can_leaves_the_others_theirs() {
        let listener = listener().await;
        let address = listener.local_addr().unwrap();
        let counts: Arc<[AtomicUsize; 3]> = Arc::default();
        let count = {
            let counts = counts.clone();
            move |change| _ = counts[change as usize].fetch_add(1, SeqCst)
        };
        let bounds = Bounds { first_head_time: HOUR, ..Bounds::of_clients(16, HOUR, HOUR) };
        let drain = CancellationToken::new();
        let serving = tokio::spawn(serve(listener, routes(), bounds, count, drain.clone()));
        let mut greedy = Vec::new();
        for _ in 0..8 {
            greedy.push(connect([127, 0, 0, 2], address).await);
        }
        // More are refused, each of them at once, and say why.
        for _ in 0..20 {
            let mut answer = String::new();
            let mut more = connect([127, 0, 0, 2], address).await;
            timeout(PATIENCE, more.read_to_string(&mut answer)).await.expect("an answer").unwrap();
            let why = "this address has 8 connections, which is the limit per peer";
            assert!(answer.starts_with("HTTP/1.1 429 ") && answer.contains(why) && answer.contains("Busy"), "{answer}");
        }
        for _ in 0..20 {
            assert!(ask(connect([127, 0, 0, 3], address).await).await.ends_with("ok"));
        }
        assert_eq!(counts[Change::Refused as usize].load(SeqCst), 20);
        assert!(sends_all_and_hears_why(address).await, "the connection broke while the client was sending");
        // What it gives back it may have again.
        assert!(ask(greedy.pop().unwrap()).await.ends_with("ok"));
        let begun = Instant::now();
        while counts[Change::Closed as usize].load(SeqCst) < 21 {
            assert!(begun.elapsed() < PATIENCE, "a connection is not closed");
            sleep(Duration::from_millis(10)).await;
        }
        assert!(ask(connect([127, 0, 0, 2], address).await).await.ends_with("ok"));
        drain.cancel();
        drop(greedy);
        timeout(PATIENCE, serving).await.unwrap().unwrap();
    }
}
