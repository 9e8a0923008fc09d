//! Where adapters and models come from, and which of those places are allowed.

use std::fmt;
use std::str::FromStr;

use crate::reason::{Reason, Refusal, excerpt};

/// Longest URI, in bytes.
const URI_BYTES_MAX: usize = 2048;
/// S3's own limit on a key is 1,024 bytes; no path needs more segments.
const SEGMENTS_MAX: usize = 256;
/// Rounds of percent-decoding that are looked through for a hidden `..`.
const DECODE_ROUNDS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scheme {
    File,
    S3,
    Pvc,
    HuggingFace,
    Https,
}

impl Scheme {
    const ALL: [Self; 5] = [Self::File, Self::S3, Self::Pvc, Self::HuggingFace, Self::Https];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::S3 => "s3",
            Self::Pvc => "pvc",
            Self::HuggingFace => "hf",
            Self::Https => "https",
        }
    }
}

/// A folder (or file) somewhere, in its one normal form: no `.` or `..`, no empty segment, no slash at the end.
///
/// Equal sources have equal text. Percent signs are plain characters: nothing is ever decoded on the way to a store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceUri {
    scheme: Scheme,
    /// Bucket, host, claim or organisation; empty for `file`.
    authority: String,
    segments: Vec<String>,
}

impl SourceUri {
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Bucket, host, claim or organisation; empty for `file`.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    pub fn segments(&self) -> &[String] {
        &self.segments
    }

    /// Segments with slashes between them: an S3 key prefix, or a path below a root.
    pub fn path(&self) -> String {
        self.segments.join("/")
    }

    /// The file of this name in this folder.
    ///
    /// # Errors
    /// SourceForbidden for a name that is more than one plain segment.
    pub fn join(&self, name: &str) -> Result<Self, Refusal> {
        check_file_name(name)?;
        let mut joined = self.clone();
        joined.segments.push(name.to_owned());
        Ok(joined)
    }

    /// Whether this source is `prefix` or lies below it: same scheme and authority, and whole segments.
    pub fn is_within(&self, prefix: &Self) -> bool {
        self.scheme == prefix.scheme
            && self.authority == prefix.authority
            && self.segments.starts_with(&prefix.segments)
    }

    /// The longest of the prefixes that this source is within, by its index.
    pub fn longest_prefix<'a>(&self, prefixes: impl IntoIterator<Item = &'a Self>) -> Option<usize> {
        let mut best: Option<(usize, usize)> = None;
        for (index, prefix) in prefixes.into_iter().enumerate() {
            let length = prefix.segments.len();
            // Of the same prefix given twice, the first one counts.
            if self.is_within(prefix) && best.is_none_or(|(_, longest)| length > longest) {
                best = Some((index, length));
            }
        }
        best.map(|(index, _)| index)
    }
}

impl fmt::Display for SourceUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme.as_str(), self.authority)?;
        self.segments.iter().try_for_each(|segment| write!(f, "/{segment}"))?;
        // The root of all files is the one source without authority or segments.
        if self.authority.is_empty() && self.segments.is_empty() { f.write_str("/") } else { Ok(()) }
    }
}

impl FromStr for SourceUri {
    type Err = Refusal;

    /// Reads a URI, or an absolute path as `file://`. One slash at the end changes nothing.
    fn from_str(text: &str) -> Result<Self, Refusal> {
        let forbidden = |what: String| {
            Refusal::new(Reason::SourceForbidden, format!("the source '{}' is not allowed: {what}", excerpt(text, 200)))
        };
        if text.len() > URI_BYTES_MAX {
            let length = text.len();
            return Err(forbidden(format!("it has {length} bytes, the limit is {URI_BYTES_MAX}")));
        }
        if text.chars().any(char::is_control) {
            return Err(forbidden("it holds a control character".to_owned()));
        }
        let (scheme, rest) = split_scheme(text).map_err(&forbidden)?;
        let (authority, path) = match scheme {
            Scheme::File => {
                ("", rest.strip_prefix('/').ok_or_else(|| forbidden("a file needs an absolute path".to_owned()))?)
            }
            _ => rest.split_once('/').unwrap_or((rest, "")),
        };
        let authority = match scheme {
            Scheme::File => String::new(),
            _ => check_authority(scheme, authority).map_err(&forbidden)?,
        };
        let segments = segments(path).map_err(&forbidden)?;
        Ok(Self { scheme, authority, segments })
    }
}

fn split_scheme(text: &str) -> Result<(Scheme, &str), String> {
    if text.starts_with('/') {
        return Ok((Scheme::File, text));
    }
    let known = || Scheme::ALL.map(Scheme::as_str).join(", ");
    let Some((scheme, rest)) = text.split_once("://") else {
        return Err(format!("it has no scheme; known are {}", known()));
    };
    let found = Scheme::ALL.into_iter().find(|known| scheme.eq_ignore_ascii_case(known.as_str()));
    found
        .map(|scheme| (scheme, rest))
        .ok_or_else(|| format!("its scheme is '{}'; known are {}", excerpt(scheme, 40), known()))
}

/// Characters of bucket, host, claim and organisation names; `:` only for a host's port.
fn check_authority(scheme: Scheme, authority: &str) -> Result<String, String> {
    let plain = |character: char| {
        character.is_ascii_alphanumeric()
            || matches!(character, '-' | '_' | '.')
            || (character == ':' && scheme == Scheme::Https)
    };
    if authority.is_empty() || authority.len() > 255 || !authority.chars().all(plain) || hides_dots(authority) {
        return Err(format!("'{}' is no bucket, host, claim or organisation", excerpt(authority, 100)));
    }
    Ok(if scheme == Scheme::Https { authority.to_ascii_lowercase() } else { authority.to_owned() })
}

fn segments(path: &str) -> Result<Vec<String>, String> {
    let path = path.strip_suffix('/').unwrap_or(path);
    if path.is_empty() {
        return Ok(Vec::new());
    }
    let segments: Vec<String> = path.split('/').map(str::to_owned).collect();
    if segments.len() > SEGMENTS_MAX {
        let count = segments.len();
        return Err(format!("it has {count} segments, the limit is {SEGMENTS_MAX}"));
    }
    for segment in &segments {
        check_segment(segment)?;
    }
    Ok(segments)
}

fn check_segment(segment: &str) -> Result<(), String> {
    let shown = excerpt(segment, 100);
    if segment.is_empty() {
        return Err("it holds an empty segment".to_owned());
    }
    if segment.contains(['?', '#', '\\']) {
        return Err(format!("the segment '{shown}' holds one of ? # \\"));
    }
    // A store, proxy or gateway on the way may decode what we do not: nothing may become a step upwards there.
    let mut decoded = segment.as_bytes().to_vec();
    for _ in 0..DECODE_ROUNDS {
        if decoded == b"." || decoded == b".." {
            return Err(format!("the segment '{shown}' means '.' or '..'"));
        }
        let hidden = |byte: &u8| matches!(byte, b'/' | b'\\') || byte.is_ascii_control();
        if decoded.iter().any(hidden) {
            return Err(format!("the segment '{shown}' hides a slash or a control character"));
        }
        let next = percent_decode(&decoded);
        if next == decoded {
            return Ok(());
        }
        decoded = next;
    }
    Err(format!("the segment '{shown}' is percent-encoded over and over"))
}

fn hides_dots(authority: &str) -> bool {
    authority == "." || authority.contains("..")
}

fn percent_decode(text: &[u8]) -> Vec<u8> {
    let digit = |byte: Option<&u8>| byte.and_then(|byte| char::from(*byte).to_digit(16));
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let pair = digit(after.first()).zip(digit(after.get(1)));
        match pair {
            Some((high, low)) if *first == b'%' => {
                out.push((high * 16 + low) as u8);
                rest = after.get(2..).unwrap_or_default();
            }
            _ => {
                out.push(*first);
                rest = after;
            }
        }
    }
    out
}

/// A name of a file in a folder: one plain segment.
///
/// # Errors
/// SourceForbidden for anything that could lead elsewhere.
pub fn check_file_name(name: &str) -> Result<(), Refusal> {
    let forbidden = |what: String| {
        Refusal::new(Reason::SourceForbidden, format!("the file name '{}' is not allowed: {what}", excerpt(name, 200)))
    };
    if name.len() > 255 || name.contains('/') {
        return Err(forbidden("it is no plain name".to_owned()));
    }
    if name.chars().any(char::is_control) {
        return Err(forbidden("it holds a control character".to_owned()));
    }
    check_segment(name).map_err(forbidden)
}
