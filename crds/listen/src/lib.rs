//! Accepting connections with a limit on each of their phases, and ending them in order; and the room for their bodies.

mod room;
mod told;

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use room::{Full, NotReceived, Price, Received, Room, Share, receive};
pub use told::{End, Heard, Told};

/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 64 << 10;
const HEADERS_MAX: usize = 128;

/// What one client may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Connections that are open at once.
    pub connections: usize,
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
        head_time: Duration::from_secs(5),
        first_head_time: Duration::from_secs(5),
        write_time: Duration::from_secs(5),
    };

    /// For those who ask for answers.
    pub fn of_clients(connections: usize, head_time: Duration, write_time: Duration) -> Self {
        Self { connections, head_time, first_head_time: head_time.min(Duration::from_secs(10)), write_time }
    }
}

/// Serves `routes` until `drain`; then takes no more connections, lets each end its request, and returns when all have.
/// `changed` hears +1 and -1 as connections come and go.
pub async fn serve(
    listener: TcpListener,
    routes: Router,
    bounds: Bounds,
    changed: impl Fn(i64) + Clone + Send + 'static,
    drain: CancellationToken,
) {
    let connections = TaskTracker::new();
    let places = Arc::new(Semaphore::new(bounds.connections.min(Semaphore::MAX_PERMITS)));
    // A client that ends its side of the connection counts as gone, and what it asked for is given up. One that has only
    // half closed it (`nc -N`) looks the same to the kernel until something is written, and an answer may take minutes to
    // its first byte: to wait for it would be to compute for nobody whenever a client hangs up.
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.head_time)
        .max_header_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX);
    loop {
        // Without a place nothing is accepted: the rest waits in the kernel's queue, which is bounded.
        let accepted = tokio::select! {
            () = drain.cancelled() => break,
            accepted = accept(&listener, &places) => accepted,
        };
        let Some((stream, place)) = accepted else {
            continue;
        };
        let (heard, answering) = (Arc::new(AtomicBool::new(false)), TowerToHyperService::new(routes.clone()));
        let noted = heard.clone();
        let service = service_fn(move |request| {
            noted.store(true, Relaxed);
            answering.call(request)
        });
        let builder = builder.clone();
        let (changed, drain) = (changed.clone(), drain.clone());
        connections.spawn(async move {
            let _place = place;
            changed(1);
            let io = TokioIo::new(Watched::new(stream, bounds, heard));
            let mut connection = pin!(builder.serve_connection(io, service));
            let ended = tokio::select! {
                ended = connection.as_mut() => ended,
                () = drain.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "a client connection broke");
            }
            changed(-1);
        });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => {
            // Each event of a stream shall leave at once.
            let _ = stream.set_nodelay(true);
            Some((stream, place))
        }
        Err(error) => {
            tracing::warn!(%error, "a connection could not be accepted");
            // Out of file descriptors, most likely: others must end first.
            sleep(Duration::from_millis(100)).await;
            None
        }
    }
}

/// A connection whose client must speak and must read. Until a first head has come, its time is short: else whoever opens
/// connections and says nothing would hold all places for as long as an idle client may. If the kernel takes no byte for
/// `write_time`, writing fails: else a client that stops reading would hold its place and its pod's for ever.
struct Watched {
    stream: TcpStream,
    heard: Arc<AtomicBool>,
    first_head: Pin<Box<Sleep>>,
    write_time: Duration,
    writing: Pin<Box<Sleep>>,
    waiting: bool,
}

impl Watched {
    fn new(stream: TcpStream, bounds: Bounds, heard: Arc<AtomicBool>) -> Self {
        Self {
            stream,
            heard,
            first_head: Box::pin(sleep(bounds.first_head_time)),
            write_time: bounds.write_time,
            writing: Box::pin(sleep(bounds.write_time)),
            waiting: false,
        }
    }

    fn bound<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.waiting = false;
            return result;
        }
        if !self.waiting {
            self.waiting = true;
            self.writing.as_mut().reset(Instant::now() + self.write_time);
        }
        match self.writing.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read"))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        // Bytes that drip in do not put it off.
        if !self.heard.load(Relaxed) && self.first_head.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client says nothing")));
        }
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.bound(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.bound(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(cx);
        self.bound(cx, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.bound(cx, result)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// A head that has begun does not earn its client the time of one who has asked something before; who has, keeps it.
    #[tokio::test]
    async fn a_first_head_has_less_time_than_the_next() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let [short, long] = [300, 3_000].map(Duration::from_millis);
        let bounds = Bounds { connections: 4, head_time: long, first_head_time: short, write_time: long };
        let routes = Router::new().route("/", get(|| async { "ok" }));
        tokio::spawn(serve(listener, routes, bounds, |_| (), CancellationToken::new()));
        for (first, expected) in [("GET / HTTP/1.1\r\nhost:", short), (WHOLE, long)] {
            let mut client = TcpStream::connect(address).await.unwrap();
            let begun = Instant::now();
            client.write_all(first.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            // Closed or reset: over.
            let _ = client.read_to_end(&mut answer).await;
            let lasted = begun.elapsed();
            assert!(lasted >= expected && (first == WHOLE || lasted < long), "{first:?} lasted {lasted:?}");
            assert_eq!(answer.is_empty(), first != WHOLE);
        }
    }

    const WHOLE: &str = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";

    /// Who opens connections and says nothing loses them, and those who wait behind him are served.
    #[tokio::test]
    async fn half_open_connections_give_their_places_to_others() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let bounds = Bounds {
            connections: 4,
            head_time: Duration::from_millis(300),
            first_head_time: Duration::from_millis(300),
            ..Bounds::PROBES
        };
        let drain = CancellationToken::new();
        let routes = Router::new().route("/", get(|| async { "ok" }));
        let serving = tokio::spawn(serve(listener, routes, bounds, |_| (), drain.clone()));
        let mut silent = Vec::new();
        for _ in 0..20 {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"GET / HTTP/1.1\r\nhost:").await.unwrap();
            silent.push(client);
        }
        let mut probe = TcpStream::connect(address).await.unwrap();
        probe.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        tokio::time::timeout(Duration::from_secs(5), probe.read_to_string(&mut answer)).await.unwrap().unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("ok"), "{answer}");
        drain.cancel();
        tokio::time::timeout(Duration::from_secs(5), serving).await.unwrap().unwrap();
    }
}
