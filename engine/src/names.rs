//! What clients call things: base, adapter, `adapter@digest12`. Pure.

use std::collections::{BTreeMap, BTreeSet};

use lorafleet_artifact::Digest;
use lorafleet_crds::names::{asked, version_digits, versioned};

use crate::refusal::{Refusal, shown};

/// Longest name in bytes: a namespace, a slash and an object name.
pub const NAME_BYTES_MAX: usize = 320;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    base: String,
    /// Every version that may be asked for as `name@digest`.
    versions: BTreeMap<String, BTreeSet<Digest>>,
    /// What the bare name means now.
    aliases: BTreeMap<String, Digest>,
}

/// What a request's `model` means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    Base,
    Adapter { name: String, digest: Digest },
}

impl Resolved {
    /// `name@digest12`, for the reply header; `None` for the base.
    pub fn versioned(&self) -> Option<String> {
        match self {
            Self::Base => None,
            Self::Adapter { name, digest } => Some(versioned(name, digest)),
        }
    }
}

impl Names {
    pub fn new(base: String) -> Self {
        Self { base, ..Self::default() }
    }

    pub fn base(&self) -> &str {
        &self.base
    }

    pub fn aliases(&self) -> &BTreeMap<String, Digest> {
        &self.aliases
    }

    /// Every (name, digest).
    pub fn versions(&self) -> impl Iterator<Item = (&str, Digest)> {
        self.versions.iter().flat_map(|(name, digests)| digests.iter().map(move |digest| (name.as_str(), *digest)))
    }

    /// # Errors
    /// 404 for an unknown name, 409 for a digest prefix, or a bare name, that could mean two versions.
    pub fn resolve(&self, model: &str) -> Result<Resolved, Refusal> {
        if model.is_empty() || model == self.base {
            return Ok(Resolved::Base);
        }
        if let Some(digest) = self.aliases.get(model) {
            return Ok(Resolved::Adapter { name: model.to_owned(), digest: *digest });
        }
        let (name, version) = asked(model);
        // Without a version, any that there is; one that cannot be read is none that there is.
        let digits = version.map_or(Some(""), version_digits);
        let versions = digits.and_then(|digits| Some((digits, self.versions.get(name)?)));
        let mut fitting = versions
            .into_iter()
            .flat_map(|(digits, versions)| versions.iter().filter(move |digest| digest.hex().starts_with(digits)));
        match (fitting.next(), fitting.next()) {
            (Some(digest), None) => Ok(Resolved::Adapter { name: name.to_owned(), digest: *digest }),
            (Some(first), Some(second)) => {
                let message = format!("'{}' could mean {first} or {second}", shown(model));
                Err(Refusal { param: Some("model".into()), ..Refusal::new(409, "AmbiguousDigest", message) })
            }
            (None, _) => Err(Refusal::unknown_model(model)),
        }
    }

    /// Adds a version without moving the bare name.
    pub fn add(&mut self, name: &str, digest: Digest) {
        self.versions.entry(name.to_owned()).or_default().insert(digest);
    }

    /// What the bare name means from now on.
    pub fn point(&mut self, name: &str, digest: Digest) {
        self.aliases.insert(name.to_owned(), digest);
    }

    /// Forgets a name with all its versions, and returns them.
    pub fn remove(&mut self, name: &str) -> Option<BTreeSet<Digest>> {
        self.aliases.remove(name);
        self.versions.remove(name)
    }

    pub fn knows(&self, name: &str) -> bool {
        self.versions.contains_key(name)
    }

    pub fn uses(&self, digest: &Digest) -> bool {
        self.versions.values().any(|digests| digests.contains(digest))
    }

    /// Every name under which clients may ask for a digest now: bare and versioned.
    pub fn of(&self, digest: &Digest) -> Vec<String> {
        let mut names = Vec::new();
        for (name, digests) in &self.versions {
            if digests.contains(digest) {
                if self.aliases.get(name) == Some(digest) {
                    names.push(name.clone());
                }
                names.push(versioned(name, digest));
            }
        }
        names
    }
}

/// # Errors
/// 400 for a name that could not be asked for, or would be read as something else.
pub fn check_name(param: &'static str, name: &str) -> Result<(), Refusal> {
    let problem = if name.is_empty() {
        "is empty".to_owned()
    } else if name.len() > NAME_BYTES_MAX {
        format!("has {} bytes, the limit is {NAME_BYTES_MAX}", name.len())
    } else if name.chars().any(|letter| letter.is_control() || letter.is_whitespace() || letter == ',') {
        "holds a space, a comma or a control character".to_owned()
    } else if name.contains('@') {
        "holds '@', which stands before a digest".to_owned()
    } else {
        return Ok(());
    };
    Err(Refusal::invalid(param, format!("the name '{}' {problem}", shown(name))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_mean_what_they_say_or_nothing() {
        let digest = |first: u8, last: u8| {
            let mut bytes = [0xab; 32];
            (bytes[6], bytes[31]) = (first, last);
            Digest::from_bytes(bytes)
        };
        let (old, new, twin) = (digest(1, 0), digest(2, 0), digest(2, 1));
        let mut names = Names::new("tiny".into());
        names.add("pirate", old);
        names.add("pirate", new);
        names.point("pirate", new);
        names.add("team/ticket", old);
        let adapter = |name: &str, digest| Ok(Resolved::Adapter { name: name.into(), digest });
        let check = |model: &str, expected: Result<Resolved, u16>| {
            assert_eq!(names.resolve(model).map_err(|refusal| refusal.status), expected, "{model}");
        };
        check("", Ok(Resolved::Base));
        check("tiny", Ok(Resolved::Base));
        check("pirate", adapter("pirate", new));
        check(&format!("pirate@{}", old.short()), Err(409));
        check(&format!("pirate@{}", &old.hex()[..14]), adapter("pirate", old));
        check(&format!("pirate@{old}"), adapter("pirate", old));
        check("team/ticket", adapter("team/ticket", old));
        check("pirate@", Err(404));
        check("pirate@abab", Err(404));
        check(&format!("team/ticket@{}", &old.hex()[..11]), Err(404));
        check(&format!("team/ticket@{}", &old.hex()[..12]), adapter("team/ticket", old));
        check("pirate@ABABABABABAB", Err(404));
        check("ticket", Err(404));
        check("Pirate", Err(404));
        check("../pirate", Err(404));
        assert_eq!(names.of(&new), ["pirate".to_owned(), format!("pirate@{}", new.short())]);
        names.add("pirate", twin);
        assert_eq!(names.resolve(&format!("pirate@{}", &twin.hex()[..20])).map_err(|refusal| refusal.status), Err(409));
    }

    #[test]
    fn a_name_must_be_one_that_can_be_asked_for() {
        for good in ["a", "team/ticket", "Ärger-1.2"] {
            check_name("lora_name", good).unwrap();
        }
        for bad in ["", "a b", "a@b", "a,b", "a\0b", &"x".repeat(321)] {
            assert_eq!(check_name("lora_name", bad).unwrap_err().status, 400, "{bad:?}");
        }
    }
}
