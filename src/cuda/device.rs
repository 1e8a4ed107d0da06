//! Devices: loading of the embedded kernels, and launches by name.

use super::kernels::BINARIES;
use crate::error::{Error, Result};
use crate::numa::{Near, node_of};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaStream, DeviceRepr, DriverError, LaunchConfig, PushKernelArg, result, sys,
};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

/// CUDA release of the kernels' images, as "12.8"; none without images.
const RELEASE: Option<&str> = option_env!("EVERMOE_CUDA_RELEASE");

/// A device's context with the kernels loaded, kept for the life of the process.
pub(super) struct Device {
    context: Arc<CudaContext>,
    functions: HashMap<&'static str, CudaFunction>,
    /// Its NUMA node, if the machine has several.
    node: Option<usize>,
}

/// PCI devices, by bus id.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

static DEVICES: Mutex<Vec<(usize, Arc<Device>)>> = Mutex::new(Vec::new());

/// A grid: blocks, threads of a block, dynamic shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: usize,
    pub(super) threads: usize,
    pub(super) shared_bytes: usize,
}

/// Launches kernels on a stream that the caller owns.
pub struct Launcher {
    device: Arc<Device>,
    stream: Arc<CudaStream>,
}

impl std::fmt::Debug for Launcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Launcher(cuda:{}, {:?})", self.device.context.ordinal(), self.stream.cu_stream())
    }
}

pub(super) fn driver<T>(result: std::result::Result<T, DriverError>, call: &str) -> Result<T> {
    result.map_err(|error| failed(&error, call, ""))
}

/// The error of a call, with advice.
fn failed(error: &DriverError, call: &str, advice: &str) -> Error {
    Error::Cuda { call: call.to_owned(), code: Some(error.0 as u32), problem: format!("{error}{advice}") }
}

/// Allocates near a device what the calling thread allocates, until the result is dropped.
#[cfg(feature = "python")]
pub(crate) fn near(device: usize) -> Near {
    Near::new(Device::get(device).ok().and_then(|device| device.node))
}

impl Launcher {
    /// Creates a launcher for a device's primary context (torch's). The first call for a device loads the kernels,
    /// which a graph capture does not allow: call an op once before.
    ///
    /// # Safety
    /// `stream` must be null (the default stream) or a live stream of this device, and outlive the launcher.
    ///
    /// # Errors
    /// If the build has no kernels, or the driver cannot be loaded or refuses them.
    pub unsafe fn new(device: usize, stream: *mut c_void) -> Result<Self> {
        // SAFETY: by the caller's promise.
        Ok(unsafe { Self::of(Device::get(device)?, stream) })
    }

    /// Creates a launcher on a stream of an opened device.
    ///
    /// # Safety
    /// As [`Launcher::new`].
    pub(super) unsafe fn of(device: Arc<Device>, stream: *mut c_void) -> Self {
        // SAFETY: by the caller's promise.
        let stream = unsafe { device.context.wrap_borrowed_stream(stream.cast()) };
        Self { device, stream }
    }

    /// Whether the stream is being captured into a graph.
    pub(super) fn is_capturing(&self) -> Result<bool> {
        let _current = self.device.make_current()?;
        let none = sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a live stream.
        let status = unsafe { result::stream::is_capturing(self.stream.cu_stream()) };
        Ok(driver(status, "cuStreamIsCapturing")? != none)
    }

    /// Copies from the host. Page-locked memory is read later, in the stream's order; other memory before this returns.
    ///
    /// # Safety
    /// `from` and, on the device, `to` must hold this number of bytes. `to`, and page-locked `from`, must not change
    /// until the stream has passed this point.
    pub(super) unsafe fn copy_from_host(&self, from: *const u8, to: u64, num_bytes: usize) -> Result<()> {
        let _current = self.device.make_current()?;
        if num_bytes == 0 {
            return Ok(());
        }
        // SAFETY: by the caller's promise; the context is current.
        let status =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), num_bytes, self.stream.cu_stream()) };
        driver(status.result(), "cuMemcpyHtoDAsync")
    }

    /// Copies to page-locked host memory, in the stream's order.
    ///
    /// # Safety
    /// `from` must hold `num_bytes` on the device and `to` on the host, until the stream has passed this point;
    /// meanwhile no other code may use the bytes at `to`.
    pub(super) unsafe fn copy_to_host(&self, from: u64, to: *mut u8, num_bytes: usize) -> Result<()> {
        let _current = self.device.make_current()?;
        if num_bytes == 0 {
            return Ok(());
        }
        // SAFETY: by the caller's promise; the context is current. There is no slice, as the device writes the bytes.
        let status =
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, num_bytes, self.stream.cu_stream()) };
        driver(status.result(), "cuMemcpyDtoHAsync")
    }

    /// Sets bytes.
    ///
    /// # Safety
    /// `address` must hold this number of bytes on the device, and nothing else may use them at this point of the
    /// stream.
    pub(super) unsafe fn fill(&self, address: u64, byte: u8, num_bytes: usize) -> Result<()> {
        if num_bytes == 0 {
            return Ok(());
        }
        let _current = self.device.make_current()?;
        // SAFETY: by the caller's promise; the context is current.
        let status = unsafe { result::memset_d8_async(address, byte, num_bytes, self.stream.cu_stream()) };
        driver(status, "cuMemsetD8Async")
    }

    /// Launches a kernel with 64-bit arguments.
    ///
    /// # Safety
    /// The arguments must be the kernel's, and the memory they point to must be large enough and live until the stream
    /// has passed this point.
    pub(super) unsafe fn launch(&self, name: &'static str, grid: Grid, arguments: &[u64]) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.launch_with(name, grid, arguments, None::<&u64>) }
    }

    /// Launches a kernel with 64-bit arguments followed by a table by value.
    ///
    /// # Safety
    /// As [`Launcher::launch`].
    pub(super) unsafe fn launch_with<T: DeviceRepr>(
        &self,
        name: &'static str,
        grid: Grid,
        arguments: &[u64],
        table: Option<&T>,
    ) -> Result<()> {
        let function = self.device.function(name)?;
        let small = |value: usize| {
            u32::try_from(value).ok().filter(|&value| value <= i32::MAX as u32).ok_or_else(|| {
                Error::invalid(format!("{name}: {value} is more than a CUDA grid can have; split the batch"))
            })
        };
        let config = LaunchConfig {
            grid_dim: (small(grid.blocks)?, 1, 1),
            block_dim: (small(grid.threads)?, 1, 1),
            shared_mem_bytes: small(grid.shared_bytes)?,
        };
        let mut builder = self.stream.launch_builder(function);
        for argument in arguments {
            builder.arg(argument);
        }
        if let Some(table) = table {
            builder.arg(table);
        }
        let _current = self.device.make_current()?;
        // SAFETY: by the caller's promise.
        driver(unsafe { builder.launch(config) }, name).map(drop)
    }
}

/// The calling thread's previous context (torch's current device), which is restored on drop.
#[must_use]
pub(super) struct Current(Option<sys::CUcontext>);

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            // SAFETY: the previous context is still valid.
            let _ = unsafe { result::ctx::set_current(before) };
        }
    }
}

/// Relaxes the calling thread's capture mode until dropped: calls for the copier's own streams remain legal while a
/// stream of torch's is captured into a graph. Without it, waits and page-locking fail in every thread of the process
/// and invalidate the graph.
#[must_use]
pub(super) struct RelaxedCapture(sys::CUstreamCaptureMode);

impl RelaxedCapture {
    pub(super) fn new() -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: swaps this thread's mode with that in the variable.
        let status = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        driver(status.result(), "cuThreadExchangeStreamCaptureMode")?;
        Ok(Self(mode))
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: as above; the mode is the thread's previous one.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{}", self.context.ordinal())
    }
}

impl Device {
    /// Makes the device's context current on the calling thread, until the result is dropped.
    pub(super) fn make_current(&self) -> Result<Current> {
        let before = driver(result::ctx::get_current(), "cuCtxGetCurrent")?;
        let mine = self.context.cu_ctx();
        if before == Some(mine) {
            return Ok(Current(None));
        }
        // SAFETY: the device's context, which lives as long as the process.
        driver(unsafe { result::ctx::set_current(mine) }, "cuCtxSetCurrent")?;
        Ok(Current(Some(before.unwrap_or(null_mut()))))
    }

    pub(super) fn get(index: usize) -> Result<Arc<Self>> {
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, device)) = devices.iter().find(|(known, _)| *known == index) {
            return Ok(device.clone());
        }
        let device = Arc::new(Self::open(index)?);
        devices.push((index, device.clone()));
        Ok(device)
    }

    fn open(index: usize) -> Result<Self> {
        if BINARIES.is_empty() {
            return Err(Error::Unavailable {
                what: "CUDA kernels",
                problem: "this build of evermoe has no CUDA kernels: no nvcc was found when it was compiled"
                    .into(),
            });
        }
        // SAFETY: looks for the driver's library; its initialisers are NVIDIA's.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::Unavailable {
                what: "CUDA driver",
                problem: "libcuda.so.1, the NVIDIA driver, cannot be loaded".into(),
            });
        }
        result::init().map_err(|error| not_started(&error))?;
        // The new context becomes current; torch's is restored.
        let before =
            Current(Some(driver(result::ctx::get_current(), "cuCtxGetCurrent")?.unwrap_or(null_mut())));
        let context = driver(CudaContext::new(index), "cuDevicePrimaryCtxRetain")?;
        // SAFETY: torch orders memory and its uses on streams; cudarc allocates nothing.
        unsafe { context.disable_event_tracking() };
        // All at once: loading a kernel later may wait for running kernels, such as NCCL's, which may wait for this
        // one.
        let mut functions = HashMap::new();
        for binary in BINARIES {
            let kernels = cudarc::nvrtc::Ptx::from_binary(binary.image.to_vec());
            let module = context
                .load_module(kernels)
                .map_err(|error| refused(&error, driver_version(), RELEASE.unwrap_or_default()))?;
            for name in binary.names {
                functions.insert(*name, driver(module.load_function(name), name)?);
            }
        }
        drop(before);
        let node = bus_id(&context).and_then(|bus_id| node_of(Path::new(PCI_DEVICES), &bus_id));
        Ok(Self { context, functions, node })
    }

    /// Allocates near this device what the calling thread allocates, until the result is dropped.
    pub(super) fn near(&self) -> Near {
        Near::new(self.node)
    }

    fn function(&self, name: &'static str) -> Result<&CudaFunction> {
        self.functions.get(name).ok_or_else(|| Error::Internal(format!("CUDA: no kernel named {name}")))
    }
}

/// The device's place on the PCI bus.
fn bus_id(context: &CudaContext) -> Option<String> {
    let mut text = [0 as c_char; 32];
    // SAFETY: a buffer, its size, and a device; the driver terminates what it writes.
    let status = unsafe {
        sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, context.cu_device()).result()
    };
    status.ok()?;
    // SAFETY: the driver has written a text that ends within the buffer.
    Some(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

/// The driver's version in CUDA's notation, 13000 for 13.0; 0 if unknown.
fn driver_version() -> i32 {
    let mut version = 0;
    // SAFETY: a pointer to an integer.
    let status = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    if status == sys::cudaError_enum::CUDA_SUCCESS { version } else { 0 }
}

/// Explains why the driver does not start.
fn not_started(error: &DriverError) -> Error {
    let advice = if error.0 == sys::cudaError_enum::CUDA_ERROR_STUB_LIBRARY {
        ": libcuda.so is the toolkit's stub; take its folder out of LD_LIBRARY_PATH"
    } else {
        ""
    };
    failed(error, "cuInit", advice)
}

/// Explains why the kernels cannot be loaded.
fn refused(error: &dyn std::fmt::Display, version: i32, release: &str) -> Error {
    let (major, minor) = (version / 1000, version % 1000 / 10);
    let needed = release.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0);
    let advice = if version > 0 && major < needed {
        let older = if needed > 12 {
            "; or build evermoe with pip's nvidia-cuda-nvcc-cu12==12.8.* installed as well"
        } else {
            ""
        };
        format!(
            ": the driver is that of CUDA {major}.{minor}, and the kernels need one of CUDA {needed}.0 or newer; update \
             it{older}"
        )
    } else {
        String::new()
    };
    Error::Unavailable {
        what: "CUDA kernels",
        problem: format!("CUDA: evermoe's kernels cannot be loaded: {error}{advice}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_is_named() {
        let said = |version, release| refused(&"unsupported PTX", version, release).to_string();
        let old = "that of CUDA 12.8, and the kernels need one of CUDA 13.0 or newer; update it; or build";
        assert!(said(12_080, "13.0").contains(old), "{}", said(12_080, "13.0"));
        let old = "that of CUDA 11.8, and the kernels need one of CUDA 12.0 or newer; update it";
        assert!(said(11_080, "12.8").ends_with(old), "{}", said(11_080, "12.8"));
        for (version, release) in [(13_000, "13.0"), (12_020, "12.8"), (0, "13.0")] {
            assert!(!said(version, release).contains("need"), "{version} {release}");
        }
    }
}
