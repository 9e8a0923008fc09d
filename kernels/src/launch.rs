//! What a caller gives to the driver: plain data, no handle and no call.

/// One kernel launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// Names the image.
    pub module: &'static str,
    pub function: &'static str,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory; where it is above 48 KiB together with the kernel's own, the function's attribute has to be raised
    /// first.
    pub shared_bytes: u32,
    /// The kernel's one argument, by value.
    pub argument: Vec<u8>,
    /// May start while the previous kernel of the stream ends (programmatic stream serialization): the kernel waits itself.
    pub overlaps_previous: bool,
}

/// An address in device memory.
pub type DevicePtr = u64;

/// Element type of activations and adapters. Sums are in f32 always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    Bf16,
    F16,
}
