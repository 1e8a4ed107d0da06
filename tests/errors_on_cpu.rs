//! Errors of work on a device, with the stand-in driver: they are reported late, and by every later call.
//!
//! Needs g++ and make on x86-64 and a build with kernels; otherwise it passes silently.
#![cfg(all(feature = "cuda", target_arch = "x86_64", target_os = "linux"))]

use cudarc::driver::DriverError;
use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::sys::{self, CUresult};
use driver::{Driver, EARLY, LATE, RANDOM};
use evermoe::cpu::ChunkLayout;
use evermoe::cuda::{ChunkCopier, Fetcher, HostMemory, LayerIds, PinnedBuffer, Staging};
use evermoe::snapshot::{Arena, CopyEngine, Run, digest};
use evermoe::{Error, Result};
use std::sync::Arc;

#[path = "emulator/driver.rs"]
#[allow(dead_code, reason = "each test uses its part")]
mod driver;

const SIZES: [usize; 3] = [20_003, 17, 7000];
const CHUNK_BYTES: usize = 4096;
const STAGING: Staging = Staging { count: 2, bytes: CHUNK_BYTES };

// A single test, as a process has one driver.
#[test]
fn errors_are_told_late_and_for_good() {
    let Some(driver) = Driver::load() else { return };
    drop(driver.launcher());
    for policy in [LATE, EARLY, RANDOM] {
        driver.set_policy(policy);
        told_late_and_by_all(&driver);
        for work in [1, 2, 3, 4, 5, 9, 14, 20] {
            a_copier_fails(&driver, work);
        }
        for work in [1, 2, 3, 4, 5, 9, 12, 14] {
            a_capture_fails(&driver, work, false);
            a_capture_fails(&driver, work, true);
        }
        for work in [1, 2, 3] {
            digests_fail(&driver, work);
        }
        a_page_lock_is_refused(&driver);
        for launch in 1..6 {
            nothing_is_read_after_a_refusal(&driver, launch);
        }
    }
}

fn is_illegal_address<T: std::fmt::Debug>(result: std::result::Result<T, DriverError>) -> bool {
    result.unwrap_err().0 == CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
}

/// Whether evermoe reports the driver's error; for a capture, that it was cancelled for this reason.
fn is_typed<T: std::fmt::Debug>(result: Result<T>) -> bool {
    match &result {
        Err(error @ Error::Cuda { code, .. }) => {
            *code == Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as u32) && names_illegal_address(error)
        }
        Err(error @ Error::Cancelled { .. }) => names_illegal_address(error),
        _ => false,
    }
}

fn names_illegal_address(error: &Error) -> bool {
    error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS")
}

/// A program that reads results although a wait has failed finds stale ones; the other device is not affected.
fn told_late_and_by_all(driver: &Driver) {
    let launcher = driver.launcher();
    let mut counts = [9_i64; 3];
    let ids = [0_i32, 2, 2];
    let layer = LayerIds { ids: ids.as_ptr() as u64, wide_ids: false, num_slots: ids.len() };
    // SAFETY: memory of the stated sizes, which outlives the work: `heal` discards work that has not run.
    unsafe {
        let mut count = || launcher.histograms(&[layer], counts.as_mut_ptr() as u64, 3);
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC).unwrap();
        driver.plant_fault(2); // the first work clears the counts
        count().expect("the error occurs only later");
        result::event::record(event, std::ptr::null_mut()).expect("as above");
        let told = result::event::synchronize(event);
        assert!(is_illegal_address(told), "told by what waits");
        for _ in 0..3 {
            assert!(is_illegal_address(result::event::query(event)), "neither arrived nor in transit");
            assert!(is_illegal_address(result::stream::synchronize(std::ptr::null_mut())));
            assert!(is_illegal_address(result::malloc_sync(8)));
            assert!(is_typed(count()));
        }
        assert_ne!(counts, [1, 0, 2]);
        driver.make_current(1);
        let other = result::malloc_sync(8).expect("the other device's context still works");
        result::free_sync(other).unwrap();
        driver.make_current(0);
        driver.heal();
        result::event::destroy(event).unwrap();
    }
}

fn run((address, bytes): (usize, usize)) -> Run {
    Run { address, bytes }
}

/// Tensors, with the inputs of a copier.
struct Tensors {
    tensors: Vec<Vec<u8>>,
    layout: ChunkLayout,
    workspace: Vec<u128>,
    stream: sys::CUstream,
}

impl Tensors {
    fn new() -> Self {
        let layout = ChunkLayout::new(&SIZES, CHUNK_BYTES).unwrap();
        let words = ChunkCopier::workspace_bytes(&layout, STAGING).unwrap().div_ceil(16);
        let stream = result::stream::create(StreamKind::NonBlocking).unwrap();
        Self { tensors: SIZES.map(|size| vec![7; size]).to_vec(), layout, workspace: vec![0; words], stream }
    }

    fn copier(&mut self, host: HostMemory) -> ChunkCopier {
        let addresses: Vec<u64> = self.tensors.iter().map(|tensor| tensor.as_ptr() as u64).collect();
        let workspace = self.workspace.as_mut_ptr() as u64;
        // SAFETY: memory of the stated sizes, which the tests keep longer than the copier.
        let copier = unsafe {
            ChunkCopier::new(0, self.stream.cast(), self.layout.clone(), &addresses, workspace, STAGING, host)
        };
        // SAFETY: a live stream.
        unsafe { result::stream::synchronize(self.stream).unwrap() };
        copier.unwrap()
    }
}

/// Every call that starts or waits reports the error; chunks that are missing are never reported as done; the drops
/// return.
fn a_copier_fails(driver: &Driver, work: i32) {
    let mut tensors = Tensors::new();
    let copier = tensors.copier(HostMemory::Own);
    let (all, torch) = (0..copier.layout().num_chunks(), tensors.stream.cast());
    driver.plant_fault(work);
    // SAFETY: a live stream, and chunks of this copier.
    unsafe {
        let started = copier.save(torch, all.clone()).and_then(|()| copier.release(torch));
        assert!(started.is_ok() || is_typed(started));
        let is_done = |chunk| loop {
            match copier.is_done(chunk..chunk + 1) {
                Ok(false) => {}
                other => return other,
            }
        };
        // Chunks copied before the error may be complete.
        let first_lost = all.clone().position(|chunk| is_typed(is_done(chunk))).expect("an error");
        for chunk in 0..first_lost {
            let copied = std::slice::from_raw_parts(copier.chunks().add(chunk * CHUNK_BYTES), 16);
            assert_eq!(copied, [7; 16], "chunk {chunk}");
        }
        assert!(is_typed(copier.wait(all.clone())) && is_typed(copier.is_done(all.clone())));
        assert!(is_typed(copier.save(torch, all.clone())) && is_typed(copier.restore(torch, all.clone())));
        assert!(is_typed(copier.release(torch)) && is_typed(PinnedBuffer::new(0, 1)));
    }
    drop(copier);
    drop(tensors); // nothing of this context is running any more
    driver.heal();
}

fn page_lock(arena: &Arena) -> Result<()> {
    // SAFETY: the arena's own mapping.
    arena.page_lock(|start, len| Ok(Box::new(unsafe { PinnedBuffer::register(0, start, len)? })))
}

/// The reason is reported, no lock remains, and it may be tried again.
fn a_page_lock_is_refused(driver: &Driver) {
    let folder = tempfile::tempdir().unwrap();
    let arena = Arena::create(&folder.path().join("arena"), "", &[("unit".into(), 100_000)]).unwrap();
    let mut mapped = (std::ptr::null_mut(), 0);
    let refused = arena.page_lock(|start, len| {
        mapped = (start, len);
        Err(Error::Internal("not now".into()))
    });
    assert!(refused.is_err() && !arena.is_page_locked());
    // SAFETY: a part of the arena's mapping, which lives longer.
    let part = unsafe { PinnedBuffer::register(0, mapped.0, 4096) }.unwrap();
    let refused = page_lock(&arena).unwrap_err().to_string();
    assert!(refused.contains(&format!("cuMemHostRegister of {} bytes failed", mapped.1)), "{refused}");
    assert!(!arena.is_page_locked());
    drop(part);
    page_lock(&arena).unwrap();
    drop(arena);
    // SAFETY: no byte of it is accessed; the call only shows whether it is still registered as page-locked.
    let again = unsafe { PinnedBuffer::register(0, mapped.0, 4096) };
    drop(again.expect("it was unlocked with its mapping"));
    assert!(driver.is_idle());
}

/// The capturing thread reports the error and survives; the previous version stays complete.
fn a_capture_fails(driver: &Driver, work: i32, in_place: bool) {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = Tensors::new();
    let units: Vec<_> =
        SIZES.iter().enumerate().map(|(index, &bytes)| (format!("tensor {index}"), bytes)).collect();
    let arena = Arc::new(Arena::create(&folder.path().join("arena"), "", &units).unwrap());
    if in_place {
        page_lock(&arena).unwrap();
    }
    let engine = CopyEngine::new(4 << 20).unwrap();
    engine.open(None);
    let copier = Arc::new(tensors.copier(HostMemory::Slots));
    let capture = |version| -> Result<()> {
        // SAFETY: a live stream; the tensors are not written.
        let mut fetcher = unsafe { Fetcher::new(copier.clone(), tensors.stream.cast())? };
        let runs: Vec<_> =
            fetcher.copies().into_iter().map(|runs| runs.into_iter().map(run).collect()).collect();
        if in_place {
            fetcher = fetcher.with_places(arena.layout().units().iter().map(|unit| unit.offset).collect())?;
        }
        let digests = Some(Box::new(fetcher.digests(&[1; SIZES.len()])?) as _);
        // SAFETY: the places lie in the buffer.
        let fetch = Box::new(move |buffer| unsafe { fetcher.fetch_to(buffer) });
        let runs = (!in_place).then_some(&runs[..]);
        // SAFETY: as above.
        let capture = unsafe {
            engine.capture_fetched(&arena, version, runs, fetch, digests, Box::new(copier.clone()))?
        };
        capture.wait(None, None).map(drop)
    };
    capture(1).unwrap();
    driver.plant_fault(work);
    assert!(is_typed(capture(2)), "work {work}");
    assert!(is_typed(capture(3)), "for good");
    let versions = arena.versions();
    assert_eq!(versions[0].1, 1, "{versions:?}");
    assert!(arena.verify(versions[0].0).unwrap().is_empty());
    drop(copier);
    driver.heal();
    // The engine's thread still serves other captures.
    let bytes = SIZES.map(|size| vec![5_u8; size]);
    let runs: Vec<_> = bytes
        .iter()
        .map(|tensor| vec![Run { address: tensor.as_ptr() as usize, bytes: tensor.len() }])
        .collect();
    // SAFETY: memory that stays as it is until the capture is over.
    let capture = unsafe { engine.capture(&arena, 4, &runs, Box::new(())) }.unwrap();
    capture.wait(None, None).unwrap();
    assert_eq!(arena.versions()[0].1, 4);
}

/// Digests that a device computes report the error, every time.
fn digests_fail(driver: &Driver, work: i32) {
    let mut tensors = Tensors::new();
    let copier = Arc::new(tensors.copier(HostMemory::Slots));
    let digests = || -> Result<_> {
        // SAFETY: a live stream; the tensors are not written.
        let mut fetcher = unsafe { Fetcher::new(copier.clone(), tensors.stream.cast())? };
        fetcher.digests(&[1; SIZES.len()])?()
    };
    assert_eq!(digests().unwrap(), [SIZES[0], SIZES[2]].map(|size| digest(&vec![7; size])));
    driver.plant_fault(work);
    assert!(is_typed(digests()) && is_typed(digests()), "work {work}");
    drop(copier);
    driver.heal();
}

/// One launch of many fails while the device continues: when `fetch` reports that, nothing reads the tensors any more.
fn nothing_is_read_after_a_refusal(driver: &Driver, launch: i32) {
    let mut tensors = Tensors::new();
    let copier = Arc::new(tensors.copier(HostMemory::Own));
    // SAFETY: a live stream; the tensors are not written.
    let mut fetcher = unsafe { Fetcher::new(copier.clone(), tensors.stream.cast()).unwrap() };
    driver.refuse_launch(launch);
    let failed = (0..SIZES.len() * 9).find_map(|_| fetcher.fetch().err());
    assert!(matches!(failed, Some(Error::Cuda { .. })));
    assert!(driver.is_idle(), "on its way after the end, launch {launch}");
    tensors.tensors.iter_mut().for_each(|tensor| tensor.fill(0xcc));
    let chunks = launch as usize - 1;
    // SAFETY: chunks that were copied.
    let copied = unsafe { std::slice::from_raw_parts(copier.chunks(), chunks * CHUNK_BYTES) };
    assert!(copied.iter().all(|&byte| byte == 7), "read after the end, launch {launch}");
    driver.refuse_launch(0);
}
