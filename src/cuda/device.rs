//! Devices: loading the embedded kernels, and launching one by name.

use super::kernels::BINARIES;
use crate::error::{Error, Result};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaStream, DeviceRepr, DriverError, LaunchConfig, PushKernelArg, result, sys,
};
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

/// Release of CUDA that has made the kernels' images, as "12.8"; none where there are none.
const RELEASE: Option<&str> = option_env!("EVERMOE_CUDA_RELEASE");

/// A device's context with the kernels loaded, for the life of the process.
pub(super) struct Device {
    context: Arc<CudaContext>,
    functions: HashMap<&'static str, CudaFunction>,
}

static DEVICES: Mutex<Vec<(usize, Arc<Device>)>> = Mutex::new(Vec::new());

/// A grid: blocks, threads of a block, dynamic shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: usize,
    pub(super) threads: usize,
    pub(super) shared_bytes: usize,
}

/// Launches kernels on a stream that belongs to the caller.
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

impl Launcher {
    /// A launcher for a device's primary context (torch's). The first call for a device loads the kernels, which a
    /// graph capture does not allow: call an op once before.
    ///
    /// # Safety
    /// `stream` is null (the default stream) or a live stream of this device, and outlives the launcher.
    ///
    /// # Errors
    /// When the build has no kernels, or the driver cannot be loaded or refuses them.
    pub unsafe fn new(device: usize, stream: *mut c_void) -> Result<Self> {
        // SAFETY: by the caller's promise.
        Ok(unsafe { Self::of(Device::get(device)?, stream) })
    }

    /// A launcher on a stream of a device that is open.
    ///
    /// # Safety
    /// Those of [`Launcher::new`].
    pub(super) unsafe fn of(device: Arc<Device>, stream: *mut c_void) -> Self {
        // SAFETY: by the caller's promise.
        let stream = unsafe { device.context.wrap_borrowed_stream(stream.cast()) };
        Self { device, stream }
    }

    /// Whether the stream's work goes into a graph instead of to the device.
    pub(super) fn is_capturing(&self) -> Result<bool> {
        let _current = self.device.make_current()?;
        let none = sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a live stream.
        let status = unsafe { result::stream::is_capturing(self.stream.cu_stream()) };
        Ok(driver(status, "cuStreamIsCapturing")? != none)
    }

    /// Copies from the host; page-locked memory is read later, in the stream's order, any other before this returns.
    ///
    /// # Safety
    /// `from` and, on the device, `to` hold as many bytes; `to`, and page-locked `from`, stay as they are until the
    /// stream has passed this point.
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
    /// `from` holds `num_bytes` on the device and `to` on the host, until the stream has passed this point; meanwhile
    /// no other code uses those at `to`.
    pub(super) unsafe fn copy_to_host(&self, from: u64, to: *mut u8, num_bytes: usize) -> Result<()> {
        let _current = self.device.make_current()?;
        if num_bytes == 0 {
            return Ok(());
        }
        // SAFETY: by the caller's promise; the context is current. No slice: the bytes are the device's to write.
        let status =
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, num_bytes, self.stream.cu_stream()) };
        driver(status.result(), "cuMemcpyDtoHAsync")
    }

    /// Sets bytes.
    ///
    /// # Safety
    /// `address` holds as many bytes on the device, and nothing else uses them at this point of the stream.
    pub(super) unsafe fn fill(&self, address: u64, byte: u8, num_bytes: usize) -> Result<()> {
        if num_bytes == 0 {
            return Ok(());
        }
        let _current = self.device.make_current()?;
        // SAFETY: by the caller's promise; the context is current.
        let status = unsafe { result::memset_d8_async(address, byte, num_bytes, self.stream.cu_stream()) };
        driver(status, "cuMemsetD8Async")
    }

    /// Launches a kernel of 64-bit arguments.
    ///
    /// # Safety
    /// The arguments are the kernel's, and the memory they point to is large enough and lives until the stream has
    /// passed this point.
    pub(super) unsafe fn launch(&self, name: &'static str, grid: Grid, arguments: &[u64]) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.launch_with(name, grid, arguments, None::<&u64>) }
    }

    /// Launches a kernel of 64-bit arguments and, after them, a table by value.
    ///
    /// # Safety
    /// Those of [`Launcher::launch`].
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

/// The calling thread's context from before, which comes back at the end: it is torch's current device.
#[must_use]
pub(super) struct Current(Option<sys::CUcontext>);

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            // SAFETY: what was current before. It was fine then.
            let _ = unsafe { result::ctx::set_current(before) };
        }
    }
}

/// What this thread calls for streams of our own may go on while a stream of torch's is captured into a graph: without it,
/// waits and page-locking fail in every thread of the process, and spoil the graph.
#[must_use]
pub(super) struct BesideCaptures(sys::CUstreamCaptureMode);

impl BesideCaptures {
    pub(super) fn new() -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: swaps the mode of this thread with that in the variable.
        let status = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        driver(status.result(), "cuThreadExchangeStreamCaptureMode")?;
        Ok(Self(mode))
    }
}

impl Drop for BesideCaptures {
    fn drop(&mut self) {
        // SAFETY: as above; the mode is the thread's from before.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{}", self.context.ordinal())
    }
}

impl Device {
    /// Makes the device's context the calling thread's, until the result is dropped.
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
        // SAFETY: looks for the driver's library; its initialiser is NVIDIA's.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::Unavailable {
                what: "CUDA driver",
                problem: "libcuda.so.1, the NVIDIA driver, cannot be loaded".into(),
            });
        }
        result::init().map_err(|error| not_started(&error))?;
        // The new context becomes the thread's; torch's comes back.
        let before =
            Current(Some(driver(result::ctx::get_current(), "cuCtxGetCurrent")?.unwrap_or(null_mut())));
        let context = driver(CudaContext::new(index), "cuDevicePrimaryCtxRetain")?;
        // SAFETY: memory and its order on streams are torch's business; cudarc allocates nothing here.
        unsafe { context.disable_event_tracking() };
        // All at once: a kernel that is loaded later may wait for what runs, as NCCL, which may wait for it.
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
        Ok(Self { context, functions })
    }

    fn function(&self, name: &'static str) -> Result<&CudaFunction> {
        self.functions.get(name).ok_or_else(|| Error::Internal(format!("CUDA: no kernel named {name}")))
    }
}

/// The driver's version as CUDA has it, 13000 for 13.0; 0 if it does not say.
fn driver_version() -> i32 {
    let mut version = 0;
    // SAFETY: the place of an integer.
    let status = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    if status == sys::cudaError_enum::CUDA_SUCCESS { version } else { 0 }
}

/// Why the driver does not start.
fn not_started(error: &DriverError) -> Error {
    let advice = if error.0 == sys::cudaError_enum::CUDA_ERROR_STUB_LIBRARY {
        ": libcuda.so is the toolkit's stub; take its folder out of LD_LIBRARY_PATH"
    } else {
        ""
    };
    failed(error, "cuInit", advice)
}

/// Why the kernels cannot be loaded.
fn refused(error: &dyn std::fmt::Display, version: i32, release: &str) -> Error {
    let (major, minor) = (version / 1000, version % 1000 / 10);
    let needed = release.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0);
    let advice = if version > 0 && major < needed {
        let older = if needed > 12 {
            "; or build evermoe with pip's nvidia-cuda-nvcc-cu12==12.8.* beside it"
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
