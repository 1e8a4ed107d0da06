//! The launchers, with their grids and argument lists, against a driver that runs the kernels' source on the CPU.
//!
//! Needs g++ on x86-64 and a build with kernels; passes without a word otherwise.
#![cfg(all(feature = "cuda", target_arch = "x86_64", target_os = "linux"))]

use evermoe::cpu::{self, AdamWOptions, AdamWStep, BLOCK_BYTES, ChunkLayout, Gradient, Serial};
use evermoe::cuda::{self, ChunkCopier, ChunkRange, FloatType, GradientAt, Launcher, PinnedBuffer, Span};
use half::bf16;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

const TOKENS: usize = 301;
const TOP_K: usize = 2;
const EXPERTS: usize = 5;
const RANKS: usize = 3;
const SLOTS: usize = TOKENS * TOP_K;
/// Sizes of tensors, bytes of a chunk, slots: nothing, less than a chunk, two groups of chunks, odd sizes.
const COPIES: [(&[usize], usize, usize); 4] = [
    (&[], 4096, 2),
    (&[5, 0, 4091], 8192, 3),
    (&[(4 << 20) + 3, 17, 70_000], 4096, 2),
    (&[1 << 20, 3, 300_000], 1 << 18, 1),
];

/// Builds the fake driver and loads it under the name that cudarc asks for first.
fn launcher() -> Option<Launcher> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if !cuda::has_kernels() || Command::new("g++").arg("--version").output().is_err() {
        return None;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let library = folder.path().join("libcuda.so");
    let mut make = Command::new("make");
    make.args(["--silent", "-j2", "-f"]).arg(root.join("tests/cuda_on_cpu/build.mk")).arg("DRIVER=1");
    make.arg(format!("OUT={}", folder.path().display()));
    assert!(make.status().expect("make").success());
    let path = CString::new(library.as_os_str().as_bytes()).expect("a path");
    // SAFETY: a library of ours, without initialisers; it stays loaded.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null(), "the fake driver does not load");
    // SAFETY: the default stream.
    Some(unsafe { Launcher::new(0, std::ptr::null_mut()) }.expect("a launcher"))
}

fn at<T>(values: &[T]) -> u64 {
    values.as_ptr() as u64
}

fn at_mut<T>(values: &mut [T]) -> u64 {
    values.as_mut_ptr() as u64
}

/// Random-looking ids with some -1, and their counts spread over the ranks.
fn routing() -> (Vec<i32>, Vec<i64>) {
    let ids: Vec<i32> = (0..SLOTS as i32).map(|slot| slot * slot % 97 % (EXPERTS as i32 + 1) - 1).collect();
    let mut counts = vec![0; EXPERTS * RANKS];
    for (slot, &id) in ids.iter().enumerate().filter(|&(_, &id)| id >= 0) {
        counts[id as usize * RANKS + slot % 7 % RANKS] += 1;
    }
    (ids, counts)
}

// One test: the fake driver runs one kernel at a time.
#[test]
fn launchers_agree_with_the_cpu() {
    let Some(launcher) = launcher() else { return };
    let (ids, counts) = routing();
    histogram(&launcher, &ids);
    let (row_ids, positions) = plan(&launcher, &ids, &counts);
    for width in [16, 13] {
        let x: Vec<bf16> =
            (0..TOKENS * width).map(|i| bf16::from_f32((i % 251) as f32 / 7.0 - 9.0)).collect();
        rows(&launcher, &x, width, &row_ids, &positions);
    }
    for (len, offset) in [(0, 0), (1, 0), (3, 0), (8, 0), (1031, 0), (1031, 1), (4099, 0), (4096, 3)] {
        adamw(&launcher, len, offset);
    }
    for (sizes, chunk_bytes, slots) in COPIES {
        chunk_launches(&launcher, sizes, chunk_bytes);
        copier(&launcher, sizes, chunk_bytes, slots);
    }
}

fn histogram(launcher: &Launcher, ids: &[i32]) {
    let (mut expected, mut counts) = ([0_i64; EXPERTS], [9_i64; EXPERTS]);
    cpu::histogram(ids, &mut expected, &Serial).unwrap();
    // SAFETY: arrays of the stated lengths; the fake driver is synchronous.
    unsafe { launcher.histogram(at(ids), false, at_mut(&mut counts), SLOTS, EXPERTS) }.unwrap();
    assert_eq!(counts, expected);
    // SAFETY: as above; refused before it reads.
    let refused = unsafe { launcher.histogram(at(ids), false, at_mut(&mut counts), SLOTS, 1 << 20) };
    assert!(refused.unwrap_err().to_string().contains("at most 12288 on CUDA"));
}

fn plan(launcher: &Launcher, ids: &[i32], send_counts: &[i64]) -> (Vec<i64>, Vec<i64>) {
    let mut expected = (vec![0; SLOTS], vec![0; SLOTS]);
    cpu::dispatch_plan(ids, send_counts, EXPERTS, &mut expected.0, &mut expected.1, &Serial).unwrap();
    let (mut row_ids, mut positions) = (vec![9_i64; SLOTS], vec![9_i64; SLOTS]);
    let mut scratch = vec![0x5a_u64; cuda::Plan::scratch_bytes(SLOTS, EXPERTS, RANKS).div_ceil(8) + 1];
    let plan = cuda::Plan {
        ids: at(ids),
        wide_ids: false,
        send_counts: at(send_counts),
        scratch: at_mut(&mut scratch),
        row_ids: at_mut(&mut row_ids),
        positions: at_mut(&mut positions),
        num_slots: SLOTS,
        num_experts: EXPERTS,
        num_ranks: RANKS,
    };
    // SAFETY: arrays of the stated lengths; the fake driver is synchronous.
    unsafe { launcher.dispatch_plan(&plan) }.unwrap();
    assert_eq!((&row_ids, &positions), (&expected.0, &expected.1));
    assert_eq!(scratch.last(), Some(&0x5a), "a write past the scratch memory");
    (row_ids, positions)
}

fn rows(launcher: &Launcher, x: &[bf16], width: usize, row_ids: &[i64], positions: &[i64]) {
    let mut expected = vec![bf16::ZERO; SLOTS * width];
    cpu::permute(x, row_ids, TOP_K, width, &mut expected, &Serial).unwrap();
    let mut rows = vec![bf16::ONE; SLOTS * width];
    let permute = cuda::Permute {
        x: at(x),
        row_ids: at(row_ids),
        out: at_mut(&mut rows),
        num_rows: SLOTS,
        row_bytes: width * 2,
        num_tokens: TOKENS,
        top_k: TOP_K,
    };
    // SAFETY: arrays of the stated lengths; the fake driver is synchronous.
    unsafe { launcher.permute(&permute) }.unwrap();
    assert_eq!(rows, expected);

    let weights: Vec<f32> = (0..SLOTS).map(|slot| (slot % 11) as f32 / 11.0).collect();
    let forward = cpu::Combine { rows: &rows, positions, weights: Some(&weights), width, top_k: TOP_K };
    let (mut expected, mut out) = (vec![bf16::ZERO; x.len()], vec![bf16::ONE; x.len()]);
    cpu::unpermute(&forward, &mut expected, &Serial).unwrap();
    let combine = cuda::Combine {
        rows: at(&rows),
        positions: at(positions),
        weights: at(&weights),
        out: at_mut(&mut out),
        row_type: FloatType::Bf16,
        weight_type: FloatType::F32,
        num_tokens: TOKENS,
        top_k: TOP_K,
        num_rows: SLOTS,
        width,
    };
    // SAFETY: as above.
    unsafe { launcher.unpermute(&combine) }.unwrap();
    assert_eq!(out, expected);
    backward(launcher, x, &forward, combine);
}

fn backward(launcher: &Launcher, grad: &[bf16], forward: &cpu::Combine<'_, bf16>, combine: cuda::Combine) {
    let cpu::Combine { rows, positions, weights, width, top_k } = *forward;
    let weights = weights.unwrap();
    let mut expected = (vec![bf16::ZERO; rows.len()], vec![0.0; SLOTS]);
    let arguments = cpu::Backward { grad, rows, positions, weights, width, top_k };
    cpu::unpermute_backward(&arguments, &mut expected.0, &mut expected.1, &Serial).unwrap();
    let (mut grad_rows, mut grad_weights) = (vec![bf16::ONE; rows.len()], vec![9.0_f32; SLOTS]);
    let mut row_ids = vec![9_i64; SLOTS];
    let backward = cuda::Backward {
        forward: cuda::Combine { out: at(grad), ..combine },
        row_ids: at_mut(&mut row_ids),
        grad_rows: at_mut(&mut grad_rows),
        grad_weights: at_mut(&mut grad_weights),
    };
    // SAFETY: arrays of the stated lengths; the fake driver is synchronous.
    unsafe { launcher.unpermute_backward(&backward) }.unwrap();
    assert_eq!((grad_rows, grad_weights), expected);
}

/// More steps than one launch takes; with an offset, elements that cannot be read in packs.
fn adamw(launcher: &Launcher, len: usize, offset: usize) {
    const STEPS: i64 = 11;
    let options = AdamWOptions { lr: 0.1, betas: [0.9, 0.99], eps: 1e-6, weight_decay: 0.1, maximize: false };
    let draw = |seed: usize| -> Vec<f32> {
        (0..len + offset).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 2003.0 - 0.5).collect()
    };
    let wide = draw(1);
    let narrow: Vec<bf16> = draw(2).into_iter().map(bf16::from_f32).collect();
    let (mut state, mut expected) =
        ([draw(3), draw(4), vec![0.0; len + offset]], [draw(3), draw(4), vec![0.0; len + offset]]);
    let (mut there, mut here) = (Vec::new(), Vec::new());
    for t in 1..=STEPS {
        let step = AdamWStep::new(&options, t, if t % 2 == 0 { 1.0 } else { 3.0 }, 1.0).unwrap();
        let (at_device, on_host) = match t % 3 {
            0 => (GradientAt::Zero, Gradient::Zero),
            1 => (GradientAt::F32(at(&wide[offset..])), Gradient::F32(&wide[offset..])),
            _ => (GradientAt::Bf16(at(&narrow[offset..])), Gradient::Bf16(&narrow[offset..])),
        };
        there.push((step, at_device));
        here.push((step, on_host));
    }
    let [p, m, v] = &mut expected;
    cpu::adamw(&mut p[offset..], &mut m[offset..], &mut v[offset..], &here, &Serial);
    let [p, m, v] = state.each_mut().map(|values| at_mut(&mut values[offset..]));
    // SAFETY: arrays of the stated lengths; the fake driver is synchronous.
    unsafe { launcher.adamw(&cuda::AdamW { p, m, v, num_elements: len, steps: &there }) }.unwrap();
    assert_eq!(state, expected, "{len} elements at {offset}");
}

/// Tensors at odd addresses, and what they should become.
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

    /// Overwrites the tensors on the launcher's stream.
    fn clear(&mut self, launcher: &Launcher) {
        for (address, &size) in self.addresses().into_iter().zip(&self.layout.sizes().to_vec()) {
            for byte in (0..size as u64 / 8).take(3) {
                // SAFETY: inside the tensor.
                unsafe { launcher.clear_wrong(address + 8 * byte, 1) }.unwrap();
            }
        }
    }
}

/// An address that is a multiple of 16, with room for as many bytes.
fn aligned(memory: &mut Vec<u128>, bytes: usize) -> u64 {
    memory.resize(bytes.div_ceil(16) + 1, 0x5a5a);
    at_mut(memory)
}

fn chunk_launches(launcher: &Launcher, sizes: &[usize], chunk_bytes: usize) {
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
    // SAFETY: memory of the stated lengths; the fake driver is synchronous.
    unsafe {
        launcher.upload_spans(&table, range.spans).unwrap();
        launcher.pack_chunks(&range).unwrap();
        launcher.hash_blocks(chunks, range.num_blocks, at_mut(&mut hashes)).unwrap();
        launcher.clear_wrong(at(&wrong), wrong.len()).unwrap();
        launcher.unpack_chunks(&range, at_mut(&mut wrong), chunk_bytes / BLOCK_BYTES).unwrap();
        let unaligned = ChunkRange { chunks: chunks + 8, ..range };
        assert!(launcher.pack_chunks(&unaligned).unwrap_err().to_string().contains("aligned to 16"));
    }
    // SAFETY: as many bytes as were written.
    let written = unsafe { std::slice::from_raw_parts(chunks as *const u8, packed.chunks.len()) };
    assert!(written == packed.chunks && hashes == packed.hashes);
    assert!(wrong.iter().all(|&count| count == 0));
    assert_eq!(memory.last(), Some(&0x5a5a), "a write past the chunks");
}

/// Saves, in two ranges, while the source is overwritten behind `release`; then restores it, with and without a fault.
fn copier(launcher: &Launcher, sizes: &[usize], chunk_bytes: usize, slots: usize) {
    let stream = std::ptr::null_mut();
    let mut packed = Packed::new(sizes, chunk_bytes);
    let before = packed.tensors.clone();
    let mut memory = vec![];
    let bytes = ChunkCopier::workspace_bytes(&packed.layout, slots).unwrap();
    let (workspace, addresses) = (aligned(&mut memory, bytes), packed.addresses());
    let num_chunks = packed.layout.num_chunks();
    let mut arena = vec![0_u8; packed.chunks.len() + 1];
    // SAFETY: memory of the stated lengths, which outlives the copier.
    let copier = unsafe {
        let host = (slots > 1 && num_chunks > 0)
            .then(|| PinnedBuffer::register(0, arena.as_mut_ptr(), packed.chunks.len()).unwrap());
        ChunkCopier::new(0, stream, packed.layout.clone(), &addresses, workspace, slots, host).unwrap()
    };
    // SAFETY: the default stream, and chunks of this copier; what is read has been waited for.
    unsafe {
        copier.save(stream, 0..num_chunks / 2).unwrap();
        copier.save(stream, num_chunks / 2..num_chunks).unwrap();
        copier.release(stream).unwrap();
        packed.clear(launcher);
        for chunk in 0..num_chunks {
            copier.wait(chunk).unwrap();
            assert!(copier.is_done(chunk).unwrap());
        }
        let chunks = std::slice::from_raw_parts_mut(copier.chunks(), packed.chunks.len());
        let hashes = std::slice::from_raw_parts(copier.hashes(), packed.hashes.len());
        let wrong = std::slice::from_raw_parts(copier.wrong(), num_chunks);
        assert!(chunks == packed.chunks && hashes == packed.hashes);
        assert!(num_chunks == 0 || packed.tensors != before, "the source was to be overwritten");

        copier.restore(stream, 0..num_chunks).unwrap();
        copier.release(stream).unwrap();
        (0..num_chunks).for_each(|chunk| copier.wait(chunk).unwrap());
        assert!(packed.tensors == before && wrong.iter().all(|&count| count == 0));
        if let Some(last) = num_chunks.checked_sub(1) {
            chunks[last * chunk_bytes] ^= 1;
            copier.restore(stream, last..num_chunks).unwrap();
            copier.wait(last).unwrap();
            assert_eq!(wrong[last], 1);
        }
        let beyond = copier.save(stream, 0..num_chunks + 1).unwrap_err().to_string();
        assert!(beyond.contains("expected a range within"), "{beyond}");
    }
    assert!(copier.is_done(num_chunks).unwrap_err().to_string().contains("expected less than"));
    drop(copier);
    assert_eq!(memory.last(), Some(&0x5a5a), "a write past the workspace");
}
