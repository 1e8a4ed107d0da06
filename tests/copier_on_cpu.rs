//! Copies between tensors and chunks, on several streams, with the stand-in driver: a missing wait becomes visible.
//!
//! Needs g++ and make on x86-64 and a build with kernels; otherwise it passes silently.
#![cfg(all(feature = "cuda", target_arch = "x86_64", target_os = "linux"))]

use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::sys;
use driver::{Driver, EARLY, LATE, RANDOM, finish};
use evermoe::cpu::{self, BLOCK_BYTES, ChunkLayout, Serial};
use evermoe::cuda::{ChunkCopier, ChunkRange, Fetcher, HostMemory, Launcher, PinnedBuffer, Span, Staging};
use evermoe::snapshot::{Arena, CopyEngine, Fetch, Run};
use std::sync::Arc;

#[path = "emulator/driver.rs"]
#[allow(dead_code, reason = "each test uses its part")]
mod driver;

/// Sizes of tensors, bytes of a chunk, staging buffers and their bytes: nothing, less than a chunk, a buffer that is
/// reused, chunks that share a buffer, a chunk that is larger than a buffer.
const CASES: [(&[usize], usize, [usize; 2]); 5] = [
    (&[], 4096, [2, 4096]),
    (&[5, 0, 4091], 8192, [3, 4 << 20]),
    (&[20_003, 17, 7000], 4096, [1, 4096]),
    (&[30_000, 3, 9999], 4096, [2, 3 * 4096]),
    (&[40_000, 50_001], 16_384, [2, 100]),
];

fn at<T>(values: &[T]) -> u64 {
    values.as_ptr() as u64
}

fn at_mut<T>(values: &mut [T]) -> u64 {
    values.as_mut_ptr() as u64
}

// A single test, as a process has one driver.
#[test]
fn copies_agree_with_the_cpu() {
    let Some(driver) = Driver::load() else { return };
    let launcher = driver.launcher();
    // In the role of torch's stream.
    let stream = result::stream::create(StreamKind::NonBlocking).unwrap();
    for (sizes, chunk_bytes, [count, bytes]) in CASES {
        driver.set_policy(LATE);
        launches(&launcher, sizes, chunk_bytes);
        for policy in [LATE, EARLY, RANDOM] {
            driver.set_policy(policy);
            for with_arena in [false, true] {
                there_and_back(stream, sizes, chunk_bytes, Staging { count, bytes }, with_arena);
            }
            for (host, in_place) in
                [(HostMemory::Own, false), (HostMemory::Slots, false), (HostMemory::Slots, true)]
            {
                let mut copying = Copying::new(stream, sizes, chunk_bytes);
                let copier = copying.copier(Staging { count, bytes }, host);
                captured(&copying, Arc::new(copier), in_place);
            }
        }
    }
    a_fetch_runs_ahead(&driver, stream);
    driver.set_policy(EARLY);
    let (expected, got) = save_while_overwritten(stream, false);
    assert_ne!(got, expected, "the test would not notice if `release` did nothing");
    let (expected, got) = save_while_overwritten(stream, true);
    assert_eq!(got, expected);
}

/// Tensors at odd addresses, with the expected chunks.
struct Packed {
    layout: ChunkLayout,
    tensors: Vec<Vec<u8>>,
    chunks: Vec<u8>,
    hashes: Vec<i64>,
}

impl Packed {
    fn new(sizes: &[usize], chunk_bytes: usize) -> Self {
        let layout = ChunkLayout::new(sizes, chunk_bytes).unwrap();
        let tensors: Vec<Vec<u8>> =
            sizes.iter().map(|&size| (0..=size).map(|i| (i * 7 + i / 255 + size) as u8).collect()).collect();
        let (mut chunks, mut hashes) = (vec![0xee; layout.num_chunks() * chunk_bytes], vec![]);
        hashes.resize(chunks.len() / BLOCK_BYTES, 0);
        let slices: Vec<&[u8]> = tensors.iter().map(|tensor| &tensor[1..]).collect();
        cpu::pack_chunks(&layout, 0, &slices, &mut chunks, &mut hashes, &Serial).unwrap();
        Self { layout, tensors, chunks, hashes }
    }

    fn addresses(&mut self) -> Vec<u64> {
        self.tensors.iter_mut().map(|tensor| at_mut(&mut tensor[1..])).collect()
    }
}

fn run((address, bytes): (usize, usize)) -> Run {
    Run { address, bytes }
}

/// An address that is a multiple of 16, with room for as many bytes.
fn aligned(memory: &mut Vec<u128>, bytes: usize) -> u64 {
    memory.resize(bytes.div_ceil(16) + 1, 0x5a5a);
    at_mut(memory)
}

fn launches(launcher: &Launcher, sizes: &[usize], chunk_bytes: usize) {
    let mut packed = Packed::new(sizes, chunk_bytes);
    let addresses = packed.addresses();
    let table = Span::table(&packed.layout, &addresses);
    let (mut spans, mut memory, mut hashes) =
        (vec![Span { at: 0, start: 0, bytes: 0 }; table.len()], vec![], vec![7_i64; packed.hashes.len()]);
    let chunks = aligned(&mut memory, packed.chunks.len());
    let mut wrong = vec![7_i64; packed.layout.num_chunks()];
    let range = ChunkRange {
        spans: at_mut(&mut spans),
        num_spans: table.len(),
        first_byte: 0,
        num_blocks: packed.hashes.len(),
        chunks,
        hashes: at_mut(&mut hashes),
    };
    // SAFETY: memory of the stated lengths; each use is waited for.
    unsafe {
        launcher.upload_spans(&table, range.spans).unwrap();
        launcher.pack_chunks(&range).unwrap();
        launcher.hash_blocks(chunks, range.num_blocks, at_mut(&mut hashes)).unwrap();
        launcher.clear_wrong(at(&wrong), wrong.len()).unwrap();
        launcher.unpack_chunks(&range, at_mut(&mut wrong), chunk_bytes / BLOCK_BYTES).unwrap();
        let unaligned = ChunkRange { chunks: chunks + 8, ..range };
        finish();
        assert!(launcher.pack_chunks(&unaligned).unwrap_err().to_string().contains("aligned to 16"));
    }
    // SAFETY: as many bytes as were written.
    let written = unsafe { std::slice::from_raw_parts(chunks as *const u8, packed.chunks.len()) };
    assert!(written == packed.chunks && hashes == packed.hashes);
    assert!(wrong.iter().all(|&count| count == 0));
    assert_eq!(memory.last(), Some(&0x5a5a), "a write past the chunks");
}

/// A copier of the tensors of `packed` whose bytes arrive late, on `stream`.
struct Copying {
    packed: Packed,
    source: Vec<Vec<u8>>,
    addresses: Vec<u64>,
    memory: Vec<u128>,
    arena: Vec<u8>,
    stream: sys::CUstream,
}

impl Copying {
    fn new(stream: sys::CUstream, sizes: &[usize], chunk_bytes: usize) -> Self {
        let mut packed = Packed::new(sizes, chunk_bytes);
        let source: Vec<Vec<u8>> = packed.tensors.iter().map(|tensor| tensor[1..].to_vec()).collect();
        let addresses = packed.addresses();
        let arena = vec![0; packed.chunks.len()];
        Self { packed, source, addresses, memory: vec![], arena, stream }
    }

    fn copier(&mut self, staging: Staging, host: HostMemory) -> ChunkCopier {
        let layout = self.packed.layout.clone();
        let bytes = ChunkCopier::workspace_bytes(&layout, staging).unwrap();
        let workspace = aligned(&mut self.memory, bytes);
        // SAFETY: memory of the stated lengths, which the tests keep longer than the copier.
        unsafe {
            ChunkCopier::new(0, self.stream.cast(), layout, &self.addresses, workspace, staging, host)
                .unwrap()
        }
    }

    /// Memory of the test's own for all chunks.
    fn given(&mut self) -> HostMemory {
        if self.arena.is_empty() {
            return HostMemory::Own;
        }
        // SAFETY: memory of this length, which the tests keep longer than the copier.
        let locked = unsafe { PinnedBuffer::register(0, self.arena.as_mut_ptr(), self.arena.len()) };
        HostMemory::Given(locked.unwrap())
    }

    /// Puts the tensors' values on the stream.
    fn set(&self) {
        for (&address, bytes) in
            self.addresses.iter().zip(&self.source).filter(|(_, bytes)| !bytes.is_empty())
        {
            // SAFETY: the tensors live; what is not page-locked is read before the call returns.
            unsafe { result::memcpy_htod_async(address, bytes, self.stream) }.unwrap();
        }
    }

    /// Overwrites the tensors on the stream.
    fn clear(&self) {
        for (&address, bytes) in
            self.addresses.iter().zip(&self.source).filter(|(_, bytes)| !bytes.is_empty())
        {
            // SAFETY: the tensors live.
            unsafe { result::memset_d8_async(address, 0xcc, bytes.len(), self.stream) }.unwrap();
        }
    }

    /// What the tensors hold when the stream has come to this point.
    fn read(&self) -> Vec<Vec<u8>> {
        let mut tensors: Vec<Vec<u8>> = self.source.iter().map(|bytes| vec![0; bytes.len()]).collect();
        for (&address, bytes) in
            self.addresses.iter().zip(&mut tensors).filter(|(_, bytes)| !bytes.is_empty())
        {
            // SAFETY: the tensors live; what is not page-locked is written before the call returns.
            unsafe { result::memcpy_dtoh_async(bytes, address, self.stream) }.unwrap();
        }
        tensors
    }
}

/// Saves in two ranges, while the source arrives late and is overwritten after `release`; restores; finds a fault.
fn there_and_back(
    stream: sys::CUstream,
    sizes: &[usize],
    chunk_bytes: usize,
    staging: Staging,
    with_arena: bool,
) {
    let mut copying = Copying::new(stream, sizes, chunk_bytes);
    let host = if with_arena { copying.given() } else { HostMemory::Own };
    let copier = copying.copier(staging, host);
    let torch = stream.cast();
    let (packed, num_chunks) = (&copying.packed, copying.packed.layout.num_chunks());
    // SAFETY: a live stream, and chunks of this copier; what is read has been waited for.
    unsafe {
        let (low, high) = (0..num_chunks / 2, num_chunks / 2..num_chunks);
        // In the second round the last chunk comes before the first.
        for [one, other] in [[&low, &high], [&high, &low]] {
            copier.chunks().write_bytes(0xdd, packed.chunks.len());
            copying.set();
            copier.save(torch, one.clone()).unwrap();
            copier.save(torch, other.clone()).unwrap();
            copier.release(torch).unwrap();
            copying.clear();
            copier.wait(0..num_chunks).unwrap();
            assert!(copier.is_done(0..num_chunks).unwrap());
            assert!((0..num_chunks).all(|chunk| copier.is_done(chunk..chunk + 1).unwrap()));
            assert!(std::slice::from_raw_parts(copier.chunks(), packed.chunks.len()) == packed.chunks);
            assert!(std::slice::from_raw_parts(copier.hashes(), packed.hashes.len()) == packed.hashes);
        }
        copier.restore(torch, 0..num_chunks).unwrap();
        copier.release(torch).unwrap();
        assert!(copying.read() == copying.source);
        let wrong = |chunk| {
            copier.wait(chunk..chunk + 1).unwrap();
            copier.wrong().add(chunk).read()
        };
        assert!((0..num_chunks).all(|chunk| wrong(chunk) == 0));
        if let Some(last) = num_chunks.checked_sub(1) {
            *copier.chunks().add(last * chunk_bytes) ^= 1;
            copier.restore(torch, last..num_chunks).unwrap();
            assert_eq!(wrong(last), 1);
        }
        let beyond = copier.save(torch, 0..num_chunks + 1).unwrap_err().to_string();
        assert!(beyond.contains("expected a range within"), "{beyond}");
    }
    let beyond = copier.is_done(0..num_chunks + 1).unwrap_err().to_string();
    assert!(beyond.contains("expected a range within"), "{beyond}");
    assert!(copier.is_done(num_chunks..num_chunks).unwrap());
    drop(copier);
    assert_eq!(copying.memory.last(), Some(&0x5a5a), "a write past the workspace");
}

/// A thread captures the tensors into an arena behind a gate, while their values arrive late; they are overwritten once
/// it is over. Through the copier's memory, or directly into the arena, which is page-locked.
fn captured(copying: &Copying, copier: Arc<ChunkCopier>, in_place: bool) {
    let (folder, stream) = (tempfile::tempdir().unwrap(), copying.stream);
    // Two tensors a unit, one right behind the other.
    let units: Vec<_> = copying.source.chunks(2).map(|pair| pair.concat()).collect();
    let sizes: Vec<_> =
        units.iter().enumerate().map(|(index, unit)| (format!("unit {index}"), unit.len())).collect();
    let arena = Arc::new(Arena::create(&folder.path().join("arena"), "", &sizes).unwrap());
    if in_place {
        // SAFETY: the arena's own mapping.
        let lock = |start, len| Ok(Box::new(unsafe { PinnedBuffer::register(0, start, len)? }) as _);
        arena.page_lock(lock).unwrap();
        arena.page_lock(|_, _| panic!("locked twice")).unwrap();
    }
    assert_eq!(arena.is_page_locked(), in_place);
    let mut places = vec![];
    for (unit, pair) in arena.layout().units().iter().zip(copying.source.chunks(2)) {
        places.push(unit.offset);
        places.extend(pair.get(1).map(|_| unit.offset + pair[0].len()));
    }
    let engine = CopyEngine::new(3000).unwrap();
    for version in 1..4 {
        copying.set();
        // SAFETY: a live stream; the tensors are written when the capture is over.
        let mut fetcher = unsafe { Fetcher::new(copier.clone(), stream.cast()).unwrap() };
        let copies = fetcher.copies();
        let runs: Vec<Vec<_>> =
            copies.chunks(2).map(|pair| pair.iter().flatten().copied().map(run).collect()).collect();
        let counts: Vec<usize> = copying.source.chunks(2).map(<[_]>::len).collect();
        let digests = Some(Box::new(fetcher.digests(&counts).unwrap()) as _);
        let (fetch, runs): (Fetch, _) = if in_place {
            let mut fetcher = fetcher.with_places(places.clone()).unwrap();
            // SAFETY: the places lie in the buffer.
            (Box::new(move |buffer| unsafe { fetcher.fetch_to(buffer) }), None)
        } else {
            (Box::new(move |_| fetcher.fetch()), Some(&runs[..]))
        };
        // SAFETY: as above.
        let capture = unsafe {
            engine.capture_fetched(&arena, version, runs, fetch, digests, Box::new(copier.clone()))
        }
        .unwrap();
        if version == 2 {
            engine.open(Some(4000));
            let _ = capture.wait(None, Some(std::time::Duration::from_millis(1))).unwrap();
            capture.cancel();
            nothing_comes_later(&arena, capture.index());
        } else {
            capture.hurry();
            capture.wait(None, None).unwrap();
        }
        engine.close_gate();
        copying.clear();
        for (index, version) in arena.versions() {
            // The device's digests are those of the host's bytes.
            assert!(arena.verify(index).unwrap().is_empty(), "{version}");
            let start = arena.buffer(index).unwrap();
            for (unit, bytes) in arena.layout().units().iter().zip(&units) {
                // SAFETY: the unit lies in the buffer, which nobody writes now.
                let got = unsafe { std::slice::from_raw_parts(start.add(unit.offset), unit.bytes) };
                assert!(got == bytes, "{} of version {version}", unit.name);
            }
        }
    }
    assert_eq!(arena.versions()[0].1, 3);
    // SAFETY: a live stream, of which nothing may be left when the tensors go.
    unsafe { result::stream::synchronize(stream) }.unwrap();
}

/// Bytes that are written to a buffer after a capture into it was cancelled stay.
fn nothing_comes_later(arena: &Arena, index: usize) {
    let (start, bytes) = (arena.buffer(index).unwrap(), arena.layout().payload_bytes());
    // SAFETY: the buffer, which no capture uses any more.
    unsafe {
        start.write_bytes(0x3c, bytes);
        sys::cuCtxSynchronize().result().unwrap();
        assert!(std::slice::from_raw_parts(start, bytes).iter().all(|&byte| byte == 0x3c));
    }
}

/// While the host reads one transfer, others are in flight, one per staging buffer, and none after the reader stops.
/// The bytes that it reads do not change until it asks for more.
fn a_fetch_runs_ahead(driver: &Driver, stream: sys::CUstream) {
    let staging = Staging { count: 2, bytes: 4096 };
    for (policy, given_up) in [(LATE, 3), (EARLY, 3), (RANDOM, 7)] {
        driver.set_policy(policy);
        let mut copying = Copying::new(stream, &[30_000, 3, 9999], 4096);
        let copier = Arc::new(copying.copier(staging, HostMemory::Slots));
        assert_eq!(copier.host_bytes(), 3 * 4096);
        copying.set();
        let launched = driver.launches();
        // SAFETY: a live stream; the tensors are written when the fetcher is gone.
        let mut fetcher = unsafe { Fetcher::new(copier.clone(), stream.cast()).unwrap() };
        for transfer in 0..given_up {
            assert_eq!(fetcher.fetch().unwrap(), (transfer + 1) * 4096);
            assert_eq!(driver.launches() - launched, (transfer + 3).min(10));
            assert!(policy != LATE || !driver.is_idle());
            // All started transfers arrive before the host has read.
            // SAFETY: nothing but a wait.
            unsafe { sys::cuCtxSynchronize() }.result().unwrap();
            // SAFETY: a slot that nothing writes now.
            let slot = unsafe { std::slice::from_raw_parts(copier.chunks().add(transfer % 3 * 4096), 4096) };
            assert!(slot == &copying.packed.chunks[transfer * 4096..][..4096], "transfer {transfer}");
        }
        drop(fetcher);
        assert!(driver.is_idle(), "a cancelled capture that still reads");
    }
}

/// The chunks that should come, and those that come.
fn save_while_overwritten(stream: sys::CUstream, with_release: bool) -> (Vec<u8>, Vec<u8>) {
    let mut copying = Copying::new(stream, &[30_000, 3, 9999], 4096);
    let copier = copying.copier(Staging { count: 2, bytes: 4096 }, HostMemory::Own);
    copying.set();
    // SAFETY: as in `there_and_back`; bytes that change while they are copied are bytes all the same.
    unsafe {
        copier.save(stream.cast(), 0..copying.packed.layout.num_chunks()).unwrap();
        if with_release {
            copier.release(stream.cast()).unwrap();
        }
        copying.clear();
        copier.wait(0..copying.packed.layout.num_chunks()).unwrap();
        let chunks = std::slice::from_raw_parts(copier.chunks(), copying.packed.chunks.len()).to_vec();
        (copying.packed.chunks.clone(), chunks)
    }
}
