//! A store that answers without end: errors in bounded time and memory.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

mod support;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lorafleet_source::{ErrorKind, ReadLimits};
use support::{patient_limits, sources_at, uri};

/// Answers every request by `answer`, which gets the number of the request; counts the bytes that were taken.
fn store(answer: impl Fn(u64, &mut TcpStream, &AtomicU64) + Send + Sync + 'static) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (taken, answer) = (Arc::new(AtomicU64::new(0)), Arc::new(answer));
    let counted = taken.clone();
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let (mut stream, answer, counted) = (stream.unwrap(), answer.clone(), counted.clone());
            std::thread::spawn(move || {
                let mut head = Vec::new();
                let mut piece = [0; 4096];
                while !head.windows(4).any(|end| end == b"\r\n\r\n") {
                    match stream.read(&mut piece) {
                        Ok(0) | Err(_) => return,
                        Ok(read) => head.extend_from_slice(&piece[..read]),
                    }
                }
                answer(number as u64, &mut stream, &counted);
            });
        }
    });
    (address, taken)
}

/// A head that announces 4 GB, then bytes for as long as somebody takes them.
fn endless(status: &'static str) -> impl Fn(u64, &mut TcpStream, &AtomicU64) + Send + Sync {
    move |_, stream, taken| {
        let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/xml\r\ncontent-length: 4000000000\r\n\r\n<");
        let _ = stream.write_all(head.as_bytes());
        let piece = vec![b'x'; 1 << 20];
        for _ in 0..4000 {
            if stream.write_all(&piece).is_err() {
                return;
            }
            taken.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
    }
}

fn page(contents: &str, token: &str) -> String {
    listed(contents, &format!("<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"))
}

fn listed(contents: &str, more: &str) -> String {
    let body = format!("<?xml version=\"1.0\"?><ListBucketResult>{more}{contents}</ListBucketResult>");
    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn answers_without_end_are_cut() {
    for status in ["200 OK", "403 Forbidden", "500 Internal Server Error"] {
        let (address, taken) = store(endless(status));
        let error = sources_at(address, &["s3://b"], patient_limits()).list(&uri("s3://b/x")).await.unwrap_err();
        let bytes = taken.load(Ordering::Relaxed);
        // Each attempt takes the limit, and what the kernel's buffers hold.
        assert!(bytes < 100 << 20, "{status}: {bytes} bytes were taken, {error}");
    }
}

#[tokio::test]
async fn listings_that_lead_nowhere_are_ended() {
    let contents = |number: u64| format!("<Contents><Key>x/f{number}</Key><Size>1</Size></Contents>");
    for repeats in [true, false] {
        let (address, _) = store(move |number, stream, _| {
            let answer = if repeats { page(&contents(number), "same") } else { page("", &format!("t{number}")) };
            let _ = stream.write_all(answer.as_bytes());
        });
        let sources = sources_at(address, &["s3://b"], patient_limits());
        let error = sources.list(&uri("s3://b/x")).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("leads nowhere"), "{error}");
    }
}

/// A store's answer for these entries of a folder, the last one or not.
fn entries(folders: std::ops::Range<u64>, files: &[&str], more: Option<&str>) -> String {
    let folders = folders.map(|number| format!("<CommonPrefixes><Prefix>x/{number:09}/</Prefix></CommonPrefixes>"));
    let files = files.iter().map(|name| format!("<Contents><Key>x/{name}</Key><Size>1</Size></Contents>"));
    let contents = folders.chain(files).collect::<String>();
    match more {
        Some(token) => page(&contents, token),
        None => listed(&contents, "<IsTruncated>false</IsTruncated>"),
    }
}

#[tokio::test]
async fn folders_that_stand_before_the_files_hide_none_of_them() {
    // As many to a page as S3 gives.
    let (address, _) = store(|number, stream, _| {
        let answer = match number {
            0 => entries(0..1000, &[], Some("t0")),
            1 => entries(1000..1500, &["a"], Some("t1")),
            _ => entries(0..0, &["b", "c"], None),
        };
        let _ = stream.write_all(answer.as_bytes());
    });
    let listing = sources_at(address, &["s3://b"], patient_limits()).list(&uri("s3://b/x")).await.unwrap();
    assert_eq!(listing.names().collect::<Vec<_>>(), ["a", "b", "c"]);
}

#[tokio::test]
async fn folders_without_end_are_too_many() {
    let (address, _) = store(|number, stream, _| {
        let answer = entries(number * 100..(number + 1) * 100, &[], Some(&format!("t{number}")));
        let _ = stream.write_all(answer.as_bytes());
    });
    let limits = ReadLimits { entries: 1000, ..patient_limits() };
    let error = sources_at(address, &["s3://b"], limits).list(&uri("s3://b/x")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::TooLarge, "{error}");
    assert!(error.to_string().contains("'s3://b/x' holds more than 1000 files and folders"), "{error}");
}

/// A byte now and then keeps no place for days.
#[tokio::test]
async fn a_download_that_drips_is_given_up() {
    const BYTES: u64 = 1_000_000;
    let (address, _) = store(|number, stream, _| {
        let contents = format!("<Contents><Key>x/f</Key><Size>{BYTES}</Size><ETag>\"e\"</ETag></Contents>");
        if number == 0 {
            let _ = stream.write_all(listed(&contents, "<IsTruncated>false</IsTruncated>").as_bytes());
            return;
        }
        let head = format!("HTTP/1.1 206 Partial Content\r\ncontent-length: {BYTES}\r\netag: \"e\"\r\n\r\n");
        let _ = stream.write_all(head.as_bytes());
        while stream.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let limits = ReadLimits { grace: Duration::from_millis(400), bytes_per_second_min: 1 << 20, ..patient_limits() };
    let sources = sources_at(address, &["s3://b"], limits);
    let listing = sources.list(&uri("s3://b/x")).await.unwrap();
    let mut download = sources.open(&listing, listing.file("f").unwrap(), 0..BYTES).unwrap();
    let begun = Instant::now();
    let error = loop {
        match download.next().await {
            Ok(piece) => assert!(piece.is_some(), "it cannot have come whole"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(error.to_string().contains("expected are 1048576 a second"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(60), "it took {:?}", begun.elapsed());
}
