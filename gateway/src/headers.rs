//! Which headers cross the gateway. Pure.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest request id that is taken from a client.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Headers of one connection, which never cross (RFC 9110, section 7.6.1).
fn hop_by_hop(name: &HeaderName) -> bool {
    const NAMES: [&str; 9] = [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    NAMES.contains(&name.as_str())
}

/// Headers that `Connection` names as belonging to it.
fn named_by_connection(headers: &HeaderMap) -> Vec<String> {
    let values = headers.get_all(header::CONNECTION).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(|name| name.trim().to_ascii_lowercase()).collect()
}

fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let named = named_by_connection(headers);
    let mut out = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        if !hop_by_hop(name) && !named.iter().any(|named| named == name.as_str()) {
            out.append(name.clone(), value.clone());
        }
    }
    out
}

/// What an engine gets: the client's headers without its key and its cookies, with the engine's key. Compression is not
/// offered, since the gateway reads what passes.
pub fn upstream(client: &HeaderMap, engine_key: Option<&HeaderValue>) -> HeaderMap {
    let mut out = end_to_end(client);
    for name in [
        header::AUTHORIZATION,
        header::COOKIE,
        header::HOST,
        header::CONTENT_LENGTH,
        header::EXPECT,
        header::ACCEPT_ENCODING,
    ] {
        out.remove(name);
    }
    if let Some(key) = engine_key {
        out.insert(header::AUTHORIZATION, key.clone());
    }
    out
}

/// What a client gets of an engine's headers. The length is set anew, since the body may have been edited.
pub fn downstream(engine: &HeaderMap) -> HeaderMap {
    let mut out = end_to_end(engine);
    out.remove(header::CONTENT_LENGTH);
    out
}

/// The client's request id if it is short and visible, else one made from random bits.
pub fn request_id(client: &HeaderMap, random: u128) -> HeaderValue {
    let given = client.get(REQUEST_ID).filter(|value| {
        let bytes = value.as_bytes();
        !bytes.is_empty() && bytes.len() <= REQUEST_ID_BYTES_MAX && bytes.iter().all(u8::is_ascii_graphic)
    });
    let made = || HeaderValue::from_str(&format!("{random:032x}")).unwrap_or(HeaderValue::from_static("none"));
    given.cloned().unwrap_or_else(made)
}

/// The key of `Authorization: Bearer KEY`.
pub fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = list.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        let mut out = HeaderMap::new();
        pairs.for_each(|(name, value)| _ = out.append(name, value));
        out
    }

    fn text(headers: &HeaderMap) -> String {
        let mut lines: Vec<String> =
            headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        lines.sort();
        lines.join("\n")
    }

    #[test]
    fn a_clients_key_never_reaches_an_engine() {
        let client = headers(&[
            ("authorization", "Bearer client"),
            ("authorization", "Bearer second"),
            ("cookie", "a=b"),
            ("host", "pool.example"),
            ("content-length", "12"),
            ("content-type", "application/json"),
            ("connection", "keep-alive, X-Private"),
            ("keep-alive", "timeout=5"),
            ("x-private", "1"),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
            ("accept-encoding", "gzip"),
            ("expect", "100-continue"),
            ("x-request-id", "id-1"),
            ("x-stainless-lang", "python"),
        ]);
        let key = HeaderValue::from_static("Bearer engine");
        assert_eq!(
            text(&upstream(&client, Some(&key))),
            "authorization: Bearer engine\ncontent-type: application/json\nx-request-id: id-1\nx-stainless-lang: python"
        );
        assert!(!upstream(&client, None).contains_key(header::AUTHORIZATION));
    }

    #[test]
    fn an_engines_own_headers_reach_the_client() {
        let engine = headers(&[
            ("content-type", "text/event-stream"),
            ("content-length", "5"),
            ("transfer-encoding", "chunked"),
            ("x-lorafleet-adapter", "support@a1a1a1a1a1a1"),
        ]);
        assert_eq!(
            text(&downstream(&engine)),
            "content-type: text/event-stream\nx-lorafleet-adapter: support@a1a1a1a1a1a1"
        );
    }

    #[test]
    fn keys_and_ids_are_read_strictly() {
        let bearer_of = |value: &'static str| bearer(&headers(&[("authorization", value)])).map(<[u8]>::to_vec);
        assert_eq!(bearer_of("Bearer abc"), Some(b"abc".to_vec()));
        assert_eq!(bearer_of("bearer  abc "), Some(b"abc".to_vec()));
        for wrong in ["", "abc", "Basic abc", "Bearer", "Bearerabc"] {
            assert_eq!(bearer_of(wrong), None, "{wrong:?}");
        }
        let id = |value: &'static str| request_id(&headers(&[("x-request-id", value)]), 255);
        assert_eq!(id("req-7"), "req-7");
        for unfit in ["", "a b"] {
            assert_eq!(id(unfit), "000000000000000000000000000000ff");
        }
        assert_eq!(request_id(&HeaderMap::new(), 1), "00000000000000000000000000000001");
    }
}
