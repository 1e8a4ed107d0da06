//! The stand-in driver reveals a missing wait between two streams.
//!
//! Needs g++ and make on x86-64 and a build with kernels; otherwise it passes silently.
#![cfg(all(feature = "cuda", target_arch = "x86_64", target_os = "linux"))]

use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::sys;
use driver::{Driver, EARLY, LATE, RANDOM};
use evermoe::cuda::{Launcher, LayerIds};
use std::ffi::c_void;
use std::ptr;

#[path = "emulator/driver.rs"]
#[allow(dead_code, reason = "each test uses its part")]
mod driver;

const IDS: [i32; 7] = [0, 2, 2, 1, 2, -1, 0];
const COUNTS: [i64; 3] = [2, 1, 3];
const BYTES: usize = size_of_val(&COUNTS);

/// A stream of its own, device memory, pinned memory of the host, an event.
struct Gear {
    compute: sys::CUstream,
    copies: sys::CUstream,
    event: sys::CUevent,
    ids: u64,
    counts: u64,
    pinned: *mut c_void,
}

impl Gear {
    fn new() -> Self {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        // SAFETY: the driver is loaded; sizes are not zero.
        unsafe {
            Self {
                compute: result::stream::create(StreamKind::NonBlocking).unwrap(),
                copies: result::stream::create(StreamKind::NonBlocking).unwrap(),
                event: result::event::create(flags).unwrap(),
                ids: result::malloc_sync(size_of_val(&IDS)).unwrap(),
                counts: result::malloc_sync(BYTES).unwrap(),
                pinned: result::malloc_host(BYTES, 0).unwrap(),
            }
        }
    }

    /// Counts on one stream, copies on another; then waits for the streams in the order given.
    fn count_and_copy(&self, driver: &Driver, with_wait: bool, copies_first: bool) -> Vec<i64> {
        let launcher = driver.launcher_on(self.compute);
        // SAFETY: memory of the stated sizes, which lives until both streams are synchronized.
        unsafe {
            result::memset_d8_async(self.counts, 0xff, BYTES, self.compute).unwrap();
            result::memcpy_htod_async(self.ids, &IDS, self.compute).unwrap();
            let layer = LayerIds { ids: self.ids, wide_ids: false, num_slots: IDS.len() };
            launcher.histograms(&[layer], self.counts, COUNTS.len()).unwrap();
            result::event::record(self.event, self.compute).unwrap();
            if with_wait {
                let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
                result::stream::wait_event(self.copies, self.event, flags).unwrap();
            }
            let host = std::slice::from_raw_parts_mut(self.pinned.cast::<i64>(), COUNTS.len());
            result::memcpy_dtoh_async(host, self.counts, self.copies).unwrap();
            assert!(result::free_host(self.pinned).is_err(), "given back while a copy needs it");
            let order = if copies_first { [self.copies, self.compute] } else { [self.compute, self.copies] };
            for stream in order {
                result::stream::synchronize(stream).unwrap();
            }
            host.to_vec()
        }
    }
}

impl Drop for Gear {
    fn drop(&mut self) {
        // SAFETY: made by `new`, unused from here on.
        unsafe {
            result::event::destroy(self.event).unwrap();
            result::free_sync(self.ids).unwrap();
            result::free_sync(self.counts).unwrap();
            result::free_host(self.pinned).unwrap();
            result::stream::destroy(self.compute).unwrap();
            result::stream::destroy(self.copies).unwrap();
        }
    }
}

// A single test, as a process has one driver.
#[test]
fn a_missing_wait_shows() {
    let Some(driver) = Driver::load() else { return };
    for policy in [LATE, EARLY, RANDOM, RANDOM + 1, RANDOM + 2] {
        driver.set_policy(policy);
        for copies_first in [true, false] {
            assert_eq!(Gear::new().count_and_copy(&driver, true, copies_first), COUNTS, "policy {policy}");
        }
    }
    for (policy, copies_first) in [(LATE, true), (EARLY, false)] {
        driver.set_policy(policy);
        let stale = Gear::new().count_and_copy(&driver, false, copies_first);
        assert_ne!(stale, COUNTS, "policy {policy}");
    }
    questions_let_work_run(&driver);
    waits_that_keep_a_processor_busy_fail();
    each_device_has_its_own(&driver);
    the_default_stream_waits(&driver);
    a_copy_past_the_end_fails(&driver);
}

/// An event has not passed before its work has run, and repeated queries end.
fn questions_let_work_run(driver: &Driver) {
    driver.set_policy(LATE);
    let gear = Gear::new();
    // SAFETY: memory of the stated sizes, which lives until the event has passed.
    unsafe {
        result::event::query(gear.event).expect("never recorded: nothing to wait for");
        result::memset_d8_async(gear.counts, 1, BYTES, gear.compute).unwrap();
        result::event::record(gear.event, gear.compute).unwrap();
        let busy = result::event::query(gear.event).unwrap_err();
        assert_eq!(busy.0, sys::CUresult::CUDA_ERROR_NOT_READY);
        assert!((0..9).any(|_| result::event::query(gear.event).is_ok()));
    }
}

/// A wait for an event that was not made for it would spin.
fn waits_that_keep_a_processor_busy_fail() {
    let gear = Gear::new();
    let mut event = ptr::null_mut();
    // SAFETY: a live event each, the second destroyed once.
    unsafe {
        assert!(result::event::synchronize(gear.event).is_err());
        let flags = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        sys::cuEventCreate(&raw mut event, flags).result().unwrap();
        result::event::synchronize(event).unwrap();
        result::event::destroy(event).unwrap();
    }
}

/// A launcher uses its own device, whichever the thread has, and restores the thread's; without that it would fail.
fn each_device_has_its_own(driver: &Driver) {
    let gear = Gear::new(); // of device 0
    let mut found = COUNTS.map(|_| 0);
    // SAFETY: memory of the stated sizes, which lives until the default stream is synchronized.
    unsafe {
        result::memcpy_htod_sync(gear.ids, &IDS).unwrap();
        let second = Launcher::new(1, ptr::null_mut()).unwrap();
        let layer = LayerIds { ids: gear.ids, wide_ids: false, num_slots: IDS.len() };
        second.histograms(&[layer], gear.counts, COUNTS.len()).unwrap();
        let mine = result::ctx::get_current().unwrap();
        assert_eq!(mine, Some(result::primary_ctx::retain(0).unwrap()));
        driver.make_current(1);
        result::stream::synchronize(ptr::null_mut()).unwrap();
        result::memcpy_dtoh_sync(&mut found, gear.counts).unwrap();
        assert_eq!(found, COUNTS);
        // What the thread of device 1 may not do with what is device 0's, and a thread without a device not at all.
        assert!(result::event::record(gear.event, ptr::null_mut()).is_err(), "an event of device 0");
        let stream = result::stream::create(StreamKind::NonBlocking).unwrap();
        assert!(result::event::record(gear.event, stream).is_err(), "an event of device 0");
        result::stream::destroy(stream).unwrap();
        assert!(std::thread::spawn(|| result::malloc_sync(BYTES).is_err()).join().unwrap());
    }
    driver.make_current(0);
}

/// The default stream waits for streams that are not created as non-blocking, and only for those.
fn the_default_stream_waits(driver: &Driver) {
    driver.set_policy(LATE);
    let gear = Gear::new();
    for (kind, expected) in [(StreamKind::Default, 7), (StreamKind::NonBlocking, 1)] {
        let mut host = [0_u8; BYTES];
        // SAFETY: memory of the stated sizes; host memory that is not pinned is written before the call returns.
        unsafe {
            let other = result::stream::create(kind).unwrap();
            result::memset_d8_async(gear.counts, 1, BYTES, ptr::null_mut()).unwrap();
            result::stream::synchronize(ptr::null_mut()).unwrap();
            result::memset_d8_async(gear.counts, 7, BYTES, other).unwrap();
            result::memcpy_dtoh_async(&mut host, gear.counts, ptr::null_mut()).unwrap();
            result::stream::synchronize(other).unwrap();
            result::stream::destroy(other).unwrap();
        }
        assert_eq!(host, [expected; BYTES]);
    }
}

fn a_copy_past_the_end_fails(driver: &Driver) {
    driver.set_policy(LATE);
    let gear = Gear::new();
    // SAFETY: refused before anything is touched.
    let refused = unsafe { result::memset_d8_async(gear.counts, 0, BYTES + 1, gear.compute) };
    assert_eq!(refused.unwrap_err().0, sys::CUresult::CUDA_ERROR_INVALID_VALUE);
}
