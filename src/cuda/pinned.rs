//! Page-locked host memory: what copies that run beside the host need.

use super::device::{BesideCaptures, Device, driver};
use crate::error::{Error, Result};
use cudarc::driver::{result, sys};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// Host memory that the device copies to and from while the host continues. Cached as any other: the host reads it at
/// full speed (cudarc's own pinned memory is write-combined, and is not).
#[derive(Debug)]
pub struct PinnedBuffer {
    device: Arc<Device>,
    start: NonNull<u8>,
    len: usize,
    /// Ours to free; else only to unlock.
    owned: bool,
}

// SAFETY: an address; the callers order the uses of the memory, as `as_ptr` says.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// New memory, zeroed.
    ///
    /// # Errors
    /// When there is too little memory, or no device.
    pub fn new(device: usize, len: usize) -> Result<Self> {
        let device = Device::get(device)?;
        let _current = device.make_current()?;
        let _beside = BesideCaptures::new()?;
        // SAFETY: a length above 0 and known flags.
        let start = unsafe { result::malloc_host(len.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) };
        let start = driver(start, &format!("cuMemHostAlloc of {len} bytes"))?;
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err(Error::Cuda {
                call: format!("cuMemHostAlloc of {len} bytes"),
                code: None,
                problem: "it gave no memory".into(),
            });
        };
        // SAFETY: just allocated, of this length.
        unsafe { start.write_bytes(0, len) };
        Ok(Self { device, start, len, owned: true })
    }

    /// Locks memory that exists, an arena of shared memory for example.
    ///
    /// # Safety
    /// `start` holds `len` bytes that stay mapped as long as the result lives, and that no other page-locked range shares.
    ///
    /// # Errors
    /// A null address or no bytes; memory that is locked already, or too much of it.
    pub unsafe fn register(device: usize, start: *mut u8, len: usize) -> Result<Self> {
        let device = Device::get(device)?;
        let Some(place) = NonNull::new(start).filter(|_| len > 0) else {
            return Err(Error::invalid("host memory: expected an address and 1 byte or more"));
        };
        let _current = device.make_current()?;
        let _beside = BesideCaptures::new()?;
        // SAFETY: by the caller's promise.
        let status =
            unsafe { sys::cuMemHostRegister_v2(start.cast(), len, sys::CU_MEMHOSTREGISTER_PORTABLE) };
        driver(status.result(), &format!("cuMemHostRegister of {len} bytes"))?;
        Ok(Self { device, start: place, len, owned: false })
    }

    /// The first byte. Copies may still be running: wait for theirs before reading, or writing what they read.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let Ok(_current) = self.device.make_current() else { return };
        let _beside = BesideCaptures::new();
        let start = self.start.as_ptr().cast::<c_void>();
        // The driver waits for copies that still use the memory. At the end of the process it may be gone: no matter.
        // SAFETY: allocated or locked by `new` or `register`, and given back once.
        let _ = unsafe {
            if self.owned { result::free_host(start) } else { sys::cuMemHostUnregister(start).result() }
        };
    }
}
