//! Calls that make the host wait for all streams of a device, counted by the stand-in driver: allocations,
//! page-locking, and the first use of a kernel where CUDA loads modules lazily.
//!
//! Needs g++ and make on x86-64 and a build with kernels; otherwise it passes silently.
#![cfg(all(feature = "cuda", target_arch = "x86_64", target_os = "linux"))]

use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::sys;
use driver::{Driver, EARLY, LATE, RANDOM, finish};
use evermoe::cpu::ChunkLayout;
use evermoe::cuda::{ChunkCopier, Fetcher, HostMemory, Launcher, LayerIds, PinnedBuffer, Staging};
use std::sync::Arc;

#[path = "emulator/driver.rs"]
#[allow(dead_code, reason = "each test uses its part")]
mod driver;

const SIZES: [usize; 3] = [20_003, 17, 7000];

// A single test, as a process has one driver.
#[test]
fn nothing_waits_for_all_streams() {
    let Some(driver) = Driver::load() else { return };
    kernels_are_loaded_at_once(&driver);
    for policy in [LATE, EARLY, RANDOM] {
        driver.set_policy(policy);
        a_copier_at_work(&driver);
    }
    what_waits_is_seen(&driver);
}

/// All kernels of a device when it is opened, none later.
fn kernels_are_loaded_at_once(driver: &Driver) {
    assert_eq!(driver.functions_loaded(), 0);
    let launcher = driver.launcher();
    let loaded = driver.functions_loaded();
    assert!(loaded > 0);
    let (ids, mut counts) = ([0_i32, 2, 2], [9_i64; 3]);
    let layer = LayerIds { ids: ids.as_ptr() as u64, wide_ids: false, num_slots: ids.len() };
    let waits = driver.waits_for_all();
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { launcher.histograms(&[layer], counts.as_mut_ptr() as u64, 3) }.unwrap();
    // Another launcher, with work on its way.
    drop(driver.launcher());
    assert_eq!((driver.functions_loaded(), driver.waits_for_all()), (loaded, waits));
    finish();
    assert_eq!(counts, [1, 0, 2]);
    // SAFETY: the default stream.
    drop(unsafe { Launcher::new(1, std::ptr::null_mut()) }.unwrap());
    assert_eq!(driver.functions_loaded(), 2 * loaded, "each device has its own");
    driver.make_current(0);
}

/// A copier makes none of these calls between its first copy and its end.
fn a_copier_at_work(driver: &Driver) {
    let stream = result::stream::create(StreamKind::NonBlocking).unwrap();
    let tensors = SIZES.map(|size| vec![7_u8; size]);
    let layout = ChunkLayout::new(&SIZES, 4096).unwrap();
    let staging = Staging { count: 2, bytes: 4096 };
    let bytes = ChunkCopier::workspace_bytes(&layout, staging).unwrap();
    let mut workspace = vec![0_u128; bytes.div_ceil(16)];
    let addresses = tensors.each_ref().map(|tensor| tensor.as_ptr() as u64);
    // SAFETY: memory of the stated sizes, which outlives the copier.
    let copier = unsafe {
        let at = workspace.as_mut_ptr() as u64;
        Arc::new(
            ChunkCopier::new(0, stream.cast(), layout, &addresses, at, staging, HostMemory::Own).unwrap(),
        )
    };
    let all = 0..copier.layout().num_chunks();
    let (mut straight, places) = (vec![0_u8; 40_000], vec![64, 20_067, 30_000]);
    // SAFETY: memory of this length, which outlives the lock.
    let lock = unsafe { PinnedBuffer::register(0, straight.as_mut_ptr(), straight.len()).unwrap() };
    let (before, mut unfinished) = (driver.waits_for_all(), 0);
    for _ in 0..3 {
        // SAFETY: a live stream; the tensors are not written.
        unsafe {
            copier.save(stream.cast(), all.clone()).unwrap();
            copier.release(stream.cast()).unwrap();
            unfinished += usize::from(!driver.is_idle());
            while !copier.is_done(all.clone()).unwrap() {}
            copier.restore(stream.cast(), all.clone()).unwrap();
            copier.release(stream.cast()).unwrap();
            copier.wait(all.clone()).unwrap();
            let mut fetcher = Fetcher::new(copier.clone(), stream.cast()).unwrap();
            while fetcher.fetch().unwrap() < SIZES.iter().sum() {}
            drop(fetcher);
            let fetcher = Fetcher::new(copier.clone(), stream.cast()).unwrap();
            let mut fetcher = fetcher.with_places(places.clone()).unwrap();
            while fetcher.fetch_to(lock.as_ptr()).unwrap() < SIZES.iter().sum() {}
        }
    }
    assert_eq!((driver.waits_for_all(), unfinished), (before, 3), "with copies on their way");
    for (&place, size) in places.iter().zip(SIZES) {
        assert!(straight[place..place + size].iter().all(|&byte| byte == 7));
    }
    drop((copier, lock));
    // SAFETY: a live stream, which is used no more.
    unsafe { result::stream::destroy(stream).unwrap() };
}

/// The same count reveals a buffer that is page-locked while copies are in flight, and memory that is allocated or
/// freed; where the driver waits, later work has already run.
fn what_waits_is_seen(driver: &Driver) {
    // SAFETY: sizes are not zero; memory is given back once, when nothing uses it.
    unsafe {
        let stream = result::stream::create(StreamKind::NonBlocking).unwrap();
        let memory = result::malloc_sync(64).unwrap();
        let mut place = vec![0_u8; 64];
        let calls: [&mut dyn FnMut(); 4] = [
            &mut || drop(PinnedBuffer::new(0, 64).unwrap()),
            &mut || drop(PinnedBuffer::register(0, place.as_mut_ptr(), place.len()).unwrap()),
            &mut || result::free_sync(result::malloc_sync(64).unwrap()).unwrap(),
            &mut || load_late(),
        ];
        for call in calls {
            for (policy, byte) in [(LATE, 1), (EARLY, 2), (RANDOM, 3)] {
                driver.set_policy(policy);
                let before = driver.waits_for_all();
                result::memset_d8_async(memory, byte, 64, stream).unwrap();
                assert!(!driver.is_idle());
                call();
                assert!(driver.waits_for_all() > before);
                assert!(policy == LATE || driver.is_idle(), "it waits");
                result::stream::synchronize(stream).unwrap();
            }
        }
        result::free_sync(memory).unwrap();
        result::stream::destroy(stream).unwrap();
    }
}

/// What a launcher would do that loads a kernel when it is first launched: a module's code and then one function.
fn load_late() {
    let image = 0xba55_ed50_u32.to_le_bytes();
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the stand-in reads four bytes; the name has its end.
    unsafe {
        sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()).result().unwrap();
        let name = c"regroup_starts".as_ptr();
        sys::cuModuleGetFunction(&raw mut function, module, name).result().unwrap();
    }
}
