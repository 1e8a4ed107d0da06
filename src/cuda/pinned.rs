//! Page-locked host memory, for copies that run concurrently with the host.

use super::device::{Device, RelaxedCapture, driver};
use crate::error::{Error, Result};
use cudarc::driver::{result, sys};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// Host memory that the device copies to and from while the host continues. It is cached like any other, so the host
/// reads it at full speed (cudarc's own pinned memory is write-combined).
#[derive(Debug)]
pub struct PinnedBuffer {
    device: Arc<Device>,
    start: NonNull<u8>,
    len: usize,
    /// Whether the memory is freed on drop, not only unlocked.
    owned: bool,
}

// SAFETY: an address; the callers order the uses of the memory, as `as_ptr` says.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates zeroed memory, on the device's NUMA node if that has room.
    ///
    /// # Errors
    /// If there is too little memory, or no device.
    pub fn new(device: usize, len: usize) -> Result<Self> {
        let device = Device::get(device)?;
        let _current = device.make_current()?;
        let _relaxed = RelaxedCapture::new()?;
        let _near = device.near();
        // SAFETY: a positive length and known flags.
        let start = unsafe { result::malloc_host(len.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) };
        let start = driver(start, &format!("cuMemHostAlloc of {len} bytes"))?;
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err(Error::Cuda {
                call: format!("cuMemHostAlloc of {len} bytes"),
                code: None,
                problem: "it returned no memory".into(),
            });
        };
        // SAFETY: just allocated, of this length.
        unsafe { start.write_bytes(0, len) };
        Ok(Self { device, start, len, owned: true })
    }

    /// Locks existing memory, such as an arena of shared memory.
    ///
    /// # Safety
    /// `start` must hold `len` bytes that stay mapped as long as the result lives and share no page-locked range.
    ///
    /// # Errors
    /// For a null address or no bytes; for memory that is locked already, and for too much memory.
    pub unsafe fn register(device: usize, start: *mut u8, len: usize) -> Result<Self> {
        let device = Device::get(device)?;
        let Some(place) = NonNull::new(start).filter(|_| len > 0) else {
            return Err(Error::invalid("host memory: expected an address and 1 byte or more"));
        };
        let _current = device.make_current()?;
        let _relaxed = RelaxedCapture::new()?;
        // SAFETY: by the caller's promise.
        let status =
            unsafe { sys::cuMemHostRegister_v2(start.cast(), len, sys::CU_MEMHOSTREGISTER_PORTABLE) };
        driver(status.result(), &format!("cuMemHostRegister of {len} bytes"))?;
        Ok(Self { device, start: place, len, owned: false })
    }

    /// Returns the address of the first byte. Copies may still be running: wait for them before reading, or before
    /// writing bytes that they read.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let Ok(_current) = self.device.make_current() else { return };
        let _relaxed = RelaxedCapture::new();
        let start = self.start.as_ptr().cast::<c_void>();
        // The driver waits for copies that still use the memory. At the end of the process it may be gone, which is
        // harmless.
        // SAFETY: allocated or locked by `new` or `register`, and released once.
        let _ = unsafe {
            if self.owned { result::free_host(start) } else { sys::cuMemHostUnregister(start).result() }
        };
    }
}
