//! One connection, each of its phases bounded.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::Bounds;

/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 64 << 10;
const HEADERS_MAX: usize = 128;
/// How long a client that is still sending is listened to after the last answer.
const LINGER: Duration = Duration::from_secs(1);

/// Answers what one client asks, until it goes, has been silent for too long, or `drain` and its last request has ended.
///
/// A client that ends its side of the connection counts as gone, and what it asked for is given up. One that has only
/// half closed it (`nc -N`) looks the same to the kernel until something is written, and an answer may take minutes to
/// its first byte: to wait for it would be to compute for nobody whenever a client hangs up.
pub async fn converse<S>(stream: S, routes: Router, bounds: Bounds, drain: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let heard = Arc::new(AtomicBool::new(false));
    let stream = TokioIo::new(Watched::new(stream, bounds, heard.clone()));
    let answering = TowerToHyperService::new(routes);
    let service = service_fn(move |request| {
        heard.store(true, Relaxed);
        answering.call(request)
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.head_time)
        .max_header_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX);
    let mut connection = pin!(builder.serve_connection(stream, service));
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
}

/// Says one thing to whoever has connected, whatever it asks, and takes what it still sends until it has seen the end.
pub async fn dismiss(mut stream: TcpStream, answer: &[u8]) {
    let said = async {
        stream.write_all(answer).await?;
        stream.shutdown().await?;
        let mut unread = [0; 8 << 10];
        while stream.read(&mut unread).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = timeout(LINGER, said).await;
}

/// A connection whose client must speak and must read. Until a first head has come, its time is short: else whoever opens
/// connections and says nothing would hold all places for as long as an idle client may. If the kernel takes no byte for
/// `write_time`, writing fails: else a client that stops reading would hold its place and its pod's for ever.
struct Watched<S> {
    stream: S,
    heard: Arc<AtomicBool>,
    first_head: Pin<Box<Sleep>>,
    write_time: Duration,
    writing: Pin<Box<Sleep>>,
    waiting: bool,
    /// Since nothing more is written.
    lingering: Option<Pin<Box<Sleep>>>,
}

impl<S: AsyncRead + Unpin> Watched<S> {
    fn new(stream: S, bounds: Bounds, heard: Arc<AtomicBool>) -> Self {
        Self {
            stream,
            heard,
            first_head: Box::pin(sleep(bounds.first_head_time)),
            write_time: bounds.write_time,
            writing: Box::pin(sleep(bounds.write_time)),
            waiting: false,
            lingering: None,
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

    /// Takes what still comes until the client has seen the end. A connection that is closed with bytes unread is reset,
    /// and a client that is still sending the body that was refused might never read why.
    fn linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let until = self.lingering.get_or_insert_with(|| Box::pin(sleep(LINGER)));
        if until.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let mut unread = [0; 8 << 10];
        loop {
            let mut buffer = ReadBuf::new(&mut unread);
            match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                Ok(()) | Err(_) => return Poll::Ready(()),
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        // Bytes that drip in do not put it off.
        if !self.heard.load(Relaxed) && self.first_head.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client says nothing")));
        }
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Watched<S> {
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
        if self.lingering.is_none() {
            let result = Pin::new(&mut self.stream).poll_shutdown(cx);
            ready!(self.bound(cx, result))?;
        }
        self.linger(cx).map(Ok)
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
