//! What stores, and others that are taken for one, answer: each kind of answer has its kind of error, in words that say what
//! was wrong. The answers are those that AWS documents, or that web servers give.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

mod support;

use lorafleet_source::ErrorKind::{Forbidden, Misconfigured, NotFound, Unavailable};
use lorafleet_source::{ErrorKind, SourceError, Sources};
use support::{access_at, patient_limits, uri};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

/// Somebody who answers every request with this.
async fn listing_of(answer: String) -> SourceError {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") && client.read_buf(&mut request).await.unwrap_or(0) > 0 {}
            let _ = client.write_all(answer.as_bytes()).await;
        }
    });
    let sources = Sources::new([access_at(address, "s3://bucket")], patient_limits());
    sources.list(&uri("s3://bucket/x")).await.unwrap_err()
}

fn http(status: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n{body}")
}

/// A store's error.
fn said(status: &str, headers: &str, code: &str, message: &str) -> String {
    let body = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    );
    http(status, &format!("content-type: application/xml\r\n{headers}"), &body)
}

async fn check(answer: String, kind: ErrorKind, words: &str) {
    let error = listing_of(answer.clone()).await;
    assert_eq!(error.kind, kind, "{answer}: {error}");
    let text = error.to_string();
    assert!(text.contains("'s3://bucket/x'") && text.contains(words), "'{words}' is not in: {text}");
}

#[tokio::test]
async fn a_store_that_cannot_be_asked_like_this() {
    let region = "x-amz-bucket-region: eu-west-1\r\n";
    let elsewhere = said("301", region, "PermanentRedirect", "The bucket must be addressed using another endpoint.");
    check(elsewhere, Misconfigured, "PermanentRedirect, HTTP 301: The bucket must").await;
    let elsewhere = said("301", region, "PermanentRedirect", "Elsewhere.");
    check(elsewhere, Misconfigured, "; the bucket is in the region 'eu-west-1'").await;
    let wrong = "the region 'us-east-1' is wrong; expecting 'eu-west-1'";
    check(said("400", "", "AuthorizationHeaderMalformed", wrong), Misconfigured, wrong).await;
    check(said("400", "", "InvalidBucketName", "The bucket is not valid."), Misconfigured, "InvalidBucketName").await;
    check(said("405", "", "MethodNotAllowed", "No."), Misconfigured, "MethodNotAllowed").await;
}

#[tokio::test]
async fn a_store_that_says_no() {
    check(said("403", "", "SignatureDoesNotMatch", "No."), Forbidden, "SignatureDoesNotMatch").await;
    check(said("400", "", "ExpiredToken", "The token has expired."), Forbidden, "ExpiredToken").await;
    check(said("404", "", "NoSuchBucket", "No."), NotFound, "NoSuchBucket").await;
    check(said("500", "", "InternalError", "Oh."), Unavailable, "InternalError").await;
    check(said("503", "", "SlowDown", "Slow."), Unavailable, "SlowDown").await;
    let long = format!("{}\n{}", "a".repeat(200), "b".repeat(200_000));
    let error = listing_of(said("403", "", "AccessDenied", &long)).await.to_string();
    assert!(error.len() < 500 && error.contains("a b") && !error.contains('\n'), "{error}");
}

#[tokio::test]
async fn somebody_who_is_no_store() {
    let page = "<!doctype html><html><body><h1>Hello</h1></body></html>";
    let html = "content-type: text/html\r\n";
    check(http("200", html, page), Misconfigured, "(HTTP 200, and no answer of an S3 store)").await;
    check(http("200", "", "{}"), Misconfigured, "(HTTP 200, and no answer").await;
    check(http("404", html, page), Misconfigured, "(HTTP 404, and no answer").await;
    check(http("403", html, page), Forbidden, "(HTTP 403, and no answer").await;
    check(
        http("302", "location: https://sso.example/login\r\n", ""),
        Misconfigured,
        "points to 'https://sso.example/login'",
    )
    .await;
    check(http("502", html, page), Unavailable, "HTTP 502").await;
    // One that breaks off is a store on a bad day.
    let cut = http("200", "", "<ListBucketResult><Contents>").replace("content-length: 28", "content-length: 2800");
    check(cut, Unavailable, "HTTP 200").await;
    check("SSH-2.0-OpenSSH_9.2\r\n".to_owned(), Unavailable, "").await;
}
