//! The compiled kernels. An image holds the kernels of one `cuda/*.cu` for one architecture.

/// What an image was compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    Sm80,
    Sm90a,
    Sm100,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    #[error(
        "no image of `{module}`: {why}; install one with `cargo run -p lorafleet-kernels --example compile -- --install` and build again"
    )]
    NoCompiler { module: String, why: &'static str },
    #[error("there is no module `{module}`; there are {known}")]
    NoModule { module: String, known: String },
    #[error("compute capability {major}.{minor} is not supported: images exist for 8.x, 9.0 and 10.x")]
    NoArch { major: i32, minor: i32 },
}

impl Arch {
    /// The image that runs on a device of this compute capability.
    pub fn of(major: i32, minor: i32) -> Result<Self, ImageError> {
        match (major, minor) {
            (8, _) => Ok(Self::Sm80),
            (9, 0) => Ok(Self::Sm90a),
            (10, _) => Ok(Self::Sm100),
            _ => Err(ImageError::NoArch { major, minor }),
        }
    }
}

/// The cubin of `module` (the name of its `.cu`), to be given to `cuModuleLoadData`.
pub fn image(module: &str, arch: Arch) -> Result<&'static [u8], ImageError> {
    if let Some((_, _, bytes)) = built::IMAGES.iter().find(|(name, a, _)| *name == module && *a == arch) {
        return Ok(bytes);
    }
    if built::IMAGES.is_empty() {
        return Err(ImageError::NoCompiler { module: module.to_owned(), why: built::MISSING });
    }
    let mut known: Vec<&str> = built::IMAGES.iter().map(|(name, _, _)| *name).collect();
    known.dedup();
    Err(ImageError::NoModule { module: module.to_owned(), known: known.join(", ") })
}

mod built {
    use super::Arch;
    include!(concat!(env!("OUT_DIR"), "/images.rs"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_or_what_is_missing() {
        match image("lora_decode", Arch::Sm90a) {
            Ok(bytes) => assert_eq!(&bytes[..4], b"\x7fELF"),
            Err(e) => {
                assert!(matches!(e, ImageError::NoCompiler { .. }));
                assert!(e.to_string().contains("--install"), "{e}");
            }
        }
    }

    #[test]
    fn an_unknown_module_names_the_known() {
        let e = image("no_such", Arch::Sm80).unwrap_err();
        assert!(e.to_string().contains("lora_decode") || matches!(e, ImageError::NoCompiler { .. }), "{e}");
    }

    #[test]
    fn capabilities() {
        assert_eq!(Arch::of(8, 9), Ok(Arch::Sm80));
        assert_eq!(Arch::of(9, 0), Ok(Arch::Sm90a));
        assert_eq!(Arch::of(10, 3), Ok(Arch::Sm100));
        assert_eq!(Arch::of(7, 5), Err(ImageError::NoArch { major: 7, minor: 5 }));
        assert_eq!(Arch::of(12, 0), Err(ImageError::NoArch { major: 12, minor: 0 }));
    }
}
