//! The driver as tests and benchmarks use it: memory, launches, graphs, events. The only place that calls it.
#![allow(unsafe_code, dead_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::{result, sys};
use lorafleet_kernels::image::{Arch, image};
use lorafleet_kernels::launch::{DevicePtr, Launch};

/// One user at a time: kernels that wait for each other's CTAs must not share the device.
static ONE: Mutex<()> = Mutex::new(());

static INIT: OnceLock<Result<(), String>> = OnceLock::new();

pub struct Gpu {
    _one: MutexGuard<'static, ()>,
    pub name: String,
    pub arch: Arch,
    pub sms: u32,
    pub stream: sys::CUstream,
    pub side: sys::CUstream,
    functions: RefCell<HashMap<&'static str, sys::CUfunction>>,
    modules: RefCell<HashMap<&'static str, sys::CUmodule>>,
    allocations: RefCell<Vec<DevicePtr>>,
    pinned: RefCell<Vec<*mut c_void>>,
}

/// Says so past the capture of the test harness, which would hold back what a passing test prints.
pub fn skipped(why: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// A captured sequence of launches.
pub struct Graph(sys::CUgraphExec);

impl Gpu {
    /// The first device; nothing where there is none, said loudly, unless `LORAFLEET_REQUIRE_GPU` is set.
    pub fn open() -> Option<Self> {
        let why = match Self::try_open() {
            Ok(gpu) => return Some(gpu),
            Err(why) => why,
        };
        let required = std::env::var_os("LORAFLEET_REQUIRE_GPU").is_some_and(|v| !v.is_empty() && v != "0");
        assert!(!required, "LORAFLEET_REQUIRE_GPU is set, but {why}");
        skipped(&format!("no GPU ({why}); LORAFLEET_REQUIRE_GPU=1 makes this a failure"));
        None
    }

    fn try_open() -> Result<Self, String> {
        INIT.get_or_init(|| {
            // The loader panics where there is no driver library. Once: hooks that two threads take and put back in turn are
            // lost, and with them what a failing test says.
            let loud = std::panic::take_hook();
            std::panic::set_hook(Box::new(|_| {}));
            let opened = std::panic::catch_unwind(result::init);
            std::panic::set_hook(loud);
            opened.map_err(|_| "no CUDA driver library".to_owned())?.map_err(|e| e.to_string())
        })
        .clone()?;
        let text = |e: cudarc::driver::DriverError| e.to_string();
        let device = result::device::get(0).map_err(text)?;
        let name = result::device::get_name(device).map_err(text)?;
        unsafe {
            let context = result::primary_ctx::retain(device).map_err(text)?;
            result::ctx::set_current(context).map_err(text)?;
            use sys::CUdevice_attribute_enum as A;
            let attribute = |a| result::device::get_attribute(device, a).map_err(text);
            let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
            let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
            let sms = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
            let arch = Arch::of(major, minor).map_err(|e| e.to_string())?;
            let new = || result::stream::create(result::stream::StreamKind::NonBlocking).map_err(text);
            let (stream, side) = (new()?, new()?);
            Ok(Self {
                _one: ONE.lock().unwrap_or_else(PoisonError::into_inner),
                name,
                arch,
                sms,
                stream,
                side,
                functions: RefCell::default(),
                modules: RefCell::default(),
                allocations: RefCell::default(),
                pinned: RefCell::default(),
            })
        }
    }

    /// Uninitialised memory; freed with the `Gpu` or by `free_all`.
    pub fn alloc(&self, bytes: usize) -> DevicePtr {
        let p = unsafe { result::malloc_sync(bytes.max(16)) }.unwrap_or_else(|e| panic!("{bytes} bytes: {e}"));
        self.allocations.borrow_mut().push(p);
        p
    }

    pub fn free_all(&self) {
        self.sync();
        for p in self.allocations.borrow_mut().drain(..) {
            unsafe { result::free_sync(p) }.unwrap();
        }
        for p in self.pinned.borrow_mut().drain(..) {
            unsafe { result::free_host(p) }.unwrap();
        }
    }

    /// Pinned memory of the host, as the device sees it: kernels, `read` and `write` take the address.
    pub fn alloc_pinned(&self, bytes: usize) -> DevicePtr {
        unsafe {
            let p = result::malloc_host(bytes.max(16), sys::CU_MEMHOSTALLOC_DEVICEMAP).unwrap();
            self.pinned.borrow_mut().push(p);
            let mut seen = 0;
            sys::cuMemHostGetDevicePointer_v2(&mut seen, p, 0).result().unwrap();
            seen
        }
    }

    pub fn upload(&self, bytes: &[u8]) -> DevicePtr {
        let p = self.alloc(bytes.len());
        self.write(p, bytes);
        p
    }

    pub fn write(&self, p: DevicePtr, bytes: &[u8]) {
        unsafe { result::memcpy_htod_sync(p, bytes) }.unwrap();
        self.arrived();
    }

    /// Copies and fills of the host go by the null stream, and may still be under way when the call is back: our streams do not wait
    /// for it.
    fn arrived(&self) {
        unsafe { result::stream::synchronize(null_mut()) }.unwrap();
    }

    pub fn read(&self, p: DevicePtr, bytes: usize) -> Vec<u8> {
        self.sync();
        let mut out = vec![0u8; bytes];
        unsafe { result::memcpy_dtoh_sync(&mut out, p) }.unwrap();
        out
    }

    pub fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize) {
        unsafe { result::memcpy_dtod_sync(to, from, bytes) }.unwrap();
        self.arrived();
    }

    pub fn fill(&self, p: DevicePtr, byte: u8, bytes: usize) {
        unsafe { result::memset_d8_sync(p, byte, bytes) }.unwrap();
        self.arrived();
    }

    pub fn sync(&self) {
        unsafe {
            result::stream::synchronize(self.stream).unwrap();
            result::stream::synchronize(self.side).unwrap();
        }
    }

    fn function(&self, module: &'static str, name: &'static str) -> sys::CUfunction {
        if let Some(f) = self.functions.borrow().get(name) {
            return *f;
        }
        let module = *self.modules.borrow_mut().entry(module).or_insert_with(|| {
            // A folder of images tried out in place of the embedded ones.
            let other = std::env::var("LORAFLEET_KERNEL_IMAGES").ok().map(|f| format!("{f}/{module}.cubin"));
            let other = other.and_then(|path| std::fs::read(path).ok());
            let bytes = other.unwrap_or_else(|| image(module, self.arch).unwrap().to_vec());
            unsafe { result::module::load_data(bytes.as_ptr().cast()) }.unwrap_or_else(|e| panic!("{module}: {e}"))
        });
        let f = unsafe { result::module::get_function(module, CString::new(name).unwrap()) }
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        self.functions.borrow_mut().insert(name, f);
        f
    }

    pub fn launch(&self, launch: &Launch) {
        self.launch_on(self.stream, launch, launch.overlaps_previous);
    }

    pub fn launch_on(&self, stream: sys::CUstream, launch: &Launch, overlap: bool) {
        let f = self.function(launch.module, launch.function);
        unsafe {
            if launch.shared_bytes > 0 {
                let a = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                result::function::set_function_attribute(f, a, launch.shared_bytes as i32).unwrap();
            }
            let mut attribute: sys::CUlaunchAttribute_st = MaybeUninit::zeroed().assume_init();
            attribute.id = sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attribute.value.programmaticStreamSerializationAllowed = 1;
            let config = sys::CUlaunchConfig_st {
                gridDimX: launch.grid[0],
                gridDimY: launch.grid[1],
                gridDimZ: launch.grid[2],
                blockDimX: launch.block[0],
                blockDimY: launch.block[1],
                blockDimZ: launch.block[2],
                sharedMemBytes: launch.shared_bytes,
                hStream: stream,
                attrs: &mut attribute,
                numAttrs: overlap.into(),
            };
            // Aligned as the struct is: its widest field has 8 bytes.
            let mut argument: Vec<u64> = vec![0; launch.argument.len().div_ceil(8)];
            std::ptr::copy_nonoverlapping(
                launch.argument.as_ptr(),
                argument.as_mut_ptr().cast(),
                launch.argument.len(),
            );
            let mut arguments: [*mut c_void; 1] = [argument.as_mut_ptr().cast()];
            sys::cuLaunchKernelEx(&config, f, arguments.as_mut_ptr(), null_mut())
                .result()
                .unwrap_or_else(|e| panic!("{}: {e}", launch.function));
        }
    }

    /// The driver's tensor map over memory at `p`.
    pub fn tensor_map(&self, p: DevicePtr, bits: Bits, map: &lorafleet_kernels::lora::gemm::Map) -> [u64; 16] {
        use sys::CUtensorMapDataType_enum as Kind;
        let kind = match bits {
            Bits::Bf16 => Kind::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            Bits::F16 => Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        };
        unsafe {
            let mut out: sys::CUtensorMap = MaybeUninit::zeroed().assume_init();
            sys::cuTensorMapEncodeTiled(
                &mut out,
                kind,
                map.sizes.len() as u32,
                p as *mut c_void,
                map.sizes.as_ptr(),
                map.strides[1..].as_ptr(),
                map.boxes.as_ptr(),
                vec![1; map.sizes.len()].as_ptr(),
                sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
            .result()
            .unwrap_or_else(|e| panic!("{map:?}: {e}"));
            out.opaque
        }
    }

    /// Captures what `record` launches on `stream`.
    pub fn capture(&self, record: impl FnOnce()) -> Graph {
        unsafe {
            let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
            result::stream::begin_capture(self.stream, mode).unwrap();
            record();
            let graph = result::stream::end_capture(self.stream).unwrap();
            let mut exec = null_mut();
            sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result().unwrap();
            result::graph::destroy(graph).unwrap();
            Graph(exec)
        }
    }

    /// What the next launch on `stream` will depend on, while it is captured.
    pub fn tips(&self, stream: sys::CUstream) -> Vec<sys::CUgraphNode> {
        unsafe {
            let mut status = sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
            let (mut id, mut graph, mut count) = (0, null_mut(), 0);
            let (mut nodes, mut edges) = (std::ptr::null(), std::ptr::null());
            sys::cuStreamGetCaptureInfo_v3(
                stream,
                &mut status,
                &mut id,
                &mut graph,
                &mut nodes,
                &mut edges,
                &mut count,
            )
            .result()
            .unwrap();
            if count == 0 { Vec::new() } else { std::slice::from_raw_parts(nodes, count).to_vec() }
        }
    }

    /// Runs what `second` launches beside what `first` launches: it may begin as soon as all CTAs of the first kernel of
    /// `first` have. What is captured behind depends on both. Before them all of `stream` must be complete.
    pub fn beside(&self, stream: sys::CUstream, first: impl FnOnce(), second: impl FnOnce()) {
        const LAUNCH_ORDER: u8 = 2;
        let before = self.tips(stream);
        first();
        let last = self.tips(stream);
        let mut begun = last.clone();
        loop {
            let parents = parents(begun[0]);
            if parents.is_empty() || parents.iter().any(|p| before.contains(p) || !is_kernel(*p)) {
                break;
            }
            begun = parents;
        }
        let programmatic = sys::CUgraphDependencyType_enum::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8;
        let edge = |from_port, type_| sys::CUgraphEdgeData { from_port, to_port: 0, type_, reserved: [0; 5] };
        set_tips(stream, &begun, edge(LAUNCH_ORDER, programmatic));
        second();
        // The second waits for the first kernel itself; for others of `first` what follows has to.
        if last != begun {
            let both = [self.tips(stream), last].concat();
            set_tips(stream, &both, edge(0, 0));
        }
    }

    pub fn replay(&self, graph: &Graph) {
        unsafe { result::graph::launch(graph.0, self.stream) }.unwrap();
    }

    pub fn fill_async(&self, p: DevicePtr, byte: u8, bytes: usize) {
        unsafe { result::memset_d8_async(p, byte, bytes, self.stream) }.unwrap();
    }

    /// Between any two addresses that the device knows.
    pub fn copy_async(&self, to: DevicePtr, from: DevicePtr, bytes: usize) {
        unsafe { sys::cuMemcpyAsync(to, from, bytes, self.stream) }.result().unwrap();
    }

    pub fn set_u32(&self, p: DevicePtr, value: u32) {
        unsafe { sys::cuMemsetD32Async(p, value, 1, self.stream) }.result().unwrap();
    }

    /// Microseconds between events round each of `times` replays; `before` runs outside of the clock.
    pub fn time(&self, graph: &Graph, times: usize, mut before: impl FnMut()) -> Vec<f64> {
        let event = || result::event::create(sys::CUevent_flags_enum::CU_EVENT_DEFAULT).unwrap();
        let events: Vec<_> = (0..times).map(|_| (event(), event())).collect();
        for (start, end) in &events {
            before();
            unsafe {
                result::event::record(*start, self.stream).unwrap();
                self.replay(graph);
                result::event::record(*end, self.stream).unwrap();
            }
        }
        self.sync();
        let took = |(start, end): (sys::CUevent, sys::CUevent)| unsafe {
            let ms = result::event::elapsed(start, end).unwrap();
            result::event::destroy(start).unwrap();
            result::event::destroy(end).unwrap();
            f64::from(ms) * 1e3
        };
        events.into_iter().map(took).collect()
    }

    /// What `side` does from here on waits for `stream`, or the other way round.
    pub fn fork(&self, from: sys::CUstream, to: sys::CUstream) {
        unsafe {
            let event = result::event::create(sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING).unwrap();
            result::event::record(event, from).unwrap();
            result::stream::wait_event(to, event, sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_DEFAULT).unwrap();
        }
    }
}

fn set_tips(stream: sys::CUstream, nodes: &[sys::CUgraphNode], edge: sys::CUgraphEdgeData) {
    let (mut nodes, edges) = (nodes.to_vec(), vec![edge; nodes.len()]);
    let set = sys::CUstreamUpdateCaptureDependencies_flags_enum::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32;
    unsafe { sys::cuStreamUpdateCaptureDependencies_v2(stream, nodes.as_mut_ptr(), edges.as_ptr(), nodes.len(), set) }
        .result()
        .unwrap_or_else(|e| {
            panic!("{e} for {edge:?} of {:?}", nodes.iter().map(|n| is_kernel(*n)).collect::<Vec<_>>())
        });
}

fn is_kernel(node: sys::CUgraphNode) -> bool {
    let mut kind = sys::CUgraphNodeType_enum::CU_GRAPH_NODE_TYPE_EMPTY;
    unsafe { sys::cuGraphNodeGetType(node, &mut kind) }.result().unwrap();
    kind == sys::CUgraphNodeType_enum::CU_GRAPH_NODE_TYPE_KERNEL
}

fn parents(node: sys::CUgraphNode) -> Vec<sys::CUgraphNode> {
    let mut count = 8;
    let mut nodes = vec![null_mut(); count];
    let mut edges: Vec<sys::CUgraphEdgeData> = vec![unsafe { MaybeUninit::zeroed().assume_init() }; count];
    unsafe { sys::cuGraphNodeGetDependencies_v2(node, nodes.as_mut_ptr(), edges.as_mut_ptr(), &mut count) }
        .result()
        .unwrap();
    nodes.truncate(count);
    nodes
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.free_all();
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        unsafe { result::graph::exec_destroy(self.0) }.unwrap();
    }
}

/// Reproducible numbers (xorshift).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 11) as usize % n
    }
    /// Uniform in (-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    pub fn shuffle<T>(&mut self, v: &mut [T]) {
        for i in (1..v.len()).rev() {
            v.swap(i, self.below(i + 1));
        }
    }
}

/// Sixteen-bit numbers of either kind.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Bits {
    Bf16,
    F16,
}

impl Bits {
    pub fn of(self, v: f32) -> u16 {
        match self {
            Bits::Bf16 => half::bf16::from_f32(v).to_bits(),
            Bits::F16 => half::f16::from_f32(v).to_bits(),
        }
    }
    pub fn value(self, bits: u16) -> f64 {
        match self {
            Bits::Bf16 => half::bf16::from_bits(bits).to_f64(),
            Bits::F16 => half::f16::from_bits(bits).to_f64(),
        }
    }
    pub fn random(self, n: usize, scale: f32, random: &mut Random) -> Vec<u16> {
        (0..n).map(|_| self.of(random.unit() * scale)).collect()
    }
}

pub fn bytes(bits: &[u16]) -> Vec<u8> {
    bits.iter().flat_map(|b| b.to_le_bytes()).collect()
}

pub fn words(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
}
