//! The launchers, with their grids and argument lists, with a driver that runs the kernels' source on the CPU.
//!
//! Needs g++ on x86-64 and a build with kernels; otherwise it passes silently.
#![cfg(all(feature = "cuda", target_arch = "x86_64", target_os = "linux"))]

use driver::{Driver, finish};
use evermoe::cpu::{
    self, AdamWOptions, AdamWStep, Arithmetic, Gradient, Rounded, Serial, SgdOptions, SgdStep,
};
use evermoe::cuda::{self, FloatType, GradientAt, Launcher, RoundedAt};
use half::{bf16, f16};

#[path = "emulator/driver.rs"]
#[allow(dead_code, reason = "each test uses its part")]
mod driver;

const TOKENS: usize = 301;
const TOP_K: usize = 2;
const EXPERTS: usize = 5;
const RANKS: usize = 3;
const SLOTS: usize = TOKENS * TOP_K;
const PLAIN: SgdOptions = SgdOptions {
    lr: 0.5,
    momentum: 0.0,
    dampening: 0.0,
    weight_decay: 0.0,
    nesterov: false,
    maximize: false,
};

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

// A single test, as a process has one driver.
#[test]
fn launchers_agree_with_the_cpu() {
    let Some(driver) = Driver::load() else { return };
    let launcher = driver.launcher();
    let (ids, counts) = routing();
    histograms(&launcher, &ids);
    regroup(&launcher);
    split_tokens(&launcher);
    let (row_ids, positions) = plan::<i32, i32>(&launcher, &ids, &counts, EXPERTS);
    let (wide_row_ids, wide_positions) = plan::<i32, i64>(&launcher, &ids, &counts, EXPERTS);
    plans(&launcher);
    scratch_is_small();
    for width in [16, 12, 10, 13] {
        let x: Vec<bf16> =
            (0..TOKENS * width).map(|i| bf16::from_f32((i % 251) as f32 / 7.0 - 9.0)).collect();
        rows(&launcher, &x, width, &row_ids, &positions);
        rows(&launcher, &x, width, &wide_row_ids, &wide_positions);
        in_8_bits(&launcher, &x, width);
    }
    for (len, offset) in [(0, 0), (1, 0), (3, 0), (8, 0), (1031, 0), (1031, 1), (4099, 0), (4096, 3)] {
        adamw(&launcher, len, offset);
        sgd(&launcher, len, offset);
    }
    for (count, rows, launches) in [(0, 1, 0), (1, 1, 1), (64, 8, 1), (64, 9, 8), (70, 3, 2), (300, 2, 5)] {
        groups(&driver, count, rows, launches);
    }
    shared_memory(&driver);
}

/// More layers than one launch takes, with both types of ids; some layers are empty.
fn histograms(launcher: &Launcher, ids: &[i32]) {
    let wide: Vec<i64> = ids.iter().map(|&id| id.into()).collect();
    let lengths: Vec<usize> =
        (0..131).map(|layer| layer * 37 % ids.len() * usize::from(layer % 5 > 0)).collect();
    let mut expected = vec![0_i64; lengths.len() * EXPERTS];
    for (&len, row) in lengths.iter().zip(expected.chunks_exact_mut(EXPERTS)) {
        cpu::histogram(&ids[..len], row, &Serial).unwrap();
    }
    let layer = |(layer, &num_slots): (usize, &usize)| cuda::LayerIds {
        ids: if layer % 2 == 0 { at(ids) } else { at(&wide) },
        wide_ids: layer % 2 != 0,
        num_slots,
    };
    let layers: Vec<_> = lengths.iter().enumerate().map(layer).collect();
    let mut counts = vec![9_i64; expected.len()];
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { launcher.histograms(&layers, at_mut(&mut counts), EXPERTS) }.unwrap();
    finish();
    assert_eq!(counts, expected);
    // SAFETY: as above; refused before it reads.
    let refused = unsafe { launcher.histograms(&layers, at_mut(&mut counts), 1 << 20) };
    assert!(refused.unwrap_err().to_string().contains("at most 12288 on CUDA"));
}

/// Every alignment of the rows, in both directions.
fn in_8_bits(launcher: &Launcher, x: &[bf16], width: usize) {
    let (num_rows, row_bytes) = (x.len() / width, cpu::fp8_row_bytes(width));
    let (mut expected, mut back) = (vec![0_u8; num_rows * row_bytes], vec![bf16::ZERO; x.len()]);
    cpu::quantize_rows(x, width, &mut expected, &Serial);
    cpu::dequantize_rows(&expected, width, &mut back, &Serial);
    let (mut packed, mut out) = (vec![9_u128; expected.len() / 16], vec![bf16::ONE; x.len()]);
    let (row_type, packed_at) = (FloatType::Bf16, at_mut(&mut packed));
    let quantize = cuda::Fp8Rows { rows: at(x), packed: packed_at, row_type, num_rows, width };
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { launcher.quantize_rows(&quantize) }.unwrap();
    finish();
    assert!(packed.iter().flat_map(|word| word.to_le_bytes()).eq(expected), "{width} columns");
    // SAFETY: as above.
    unsafe { launcher.dequantize_rows(&cuda::Fp8Rows { rows: at_mut(&mut out), ..quantize }) }.unwrap();
    finish();
    assert_eq!(out, back);
}

fn regroup(launcher: &Launcher) {
    let counts = [3_i64, 0, 41, 7, 0, 0, 9, 1, 30];
    let (num_rows, experts) = (counts.iter().sum::<i64>() as usize, 3);
    let bytes: Vec<u8> = (0..num_rows * 96 + 16).map(|byte| (byte * byte % 251) as u8).collect();
    for (row_bytes, offset) in [(96, 0), (96, 8), (96, 4), (96, 2), (40, 0), (12, 0), (2, 0), (0, 0)] {
        let rows = &bytes[offset..offset + num_rows * row_bytes];
        for inverse in [false, true] {
            let mut expected = vec![0; rows.len()];
            cpu::regroup(rows, &counts, experts, num_rows, inverse, &mut expected, &Serial).unwrap();
            let mut out = vec![9_u128; rows.len().div_ceil(16) + 1];
            let mut scratch = vec![0x5a_u64; cuda::Regroup::scratch_words(3, experts) + 1];
            let regroup = cuda::Regroup {
                rows: at(rows),
                counts: at(&counts),
                scratch: at_mut(&mut scratch),
                out: at_mut(&mut out),
                num_rows,
                row_bytes,
                num_sources: 3,
                num_experts: experts,
                inverse,
            };
            // SAFETY: arrays of the stated lengths, which live until the stream is finished.
            unsafe { launcher.regroup(&regroup) }.unwrap();
            finish();
            let written: Vec<u8> = out.iter().flat_map(|word| word.to_le_bytes()).take(rows.len()).collect();
            assert_eq!(written, expected, "rows of {row_bytes} bytes at {offset}");
            assert_eq!((scratch.last(), out.last()), (Some(&0x5a), Some(&9)), "a write past the end");
            // SAFETY: refused before it reads.
            let odd = unsafe { launcher.regroup(&cuda::Regroup { row_bytes: 3, ..regroup }) };
            assert!(odd.unwrap_err().to_string().contains("rows of even size, got 3 bytes"));
        }
    }
}

fn split_tokens(launcher: &Launcher) {
    for ranks in [1, 3, 40, 128] {
        let tokens: Vec<i64> = (0..EXPERTS * ranks).map(|cell| (cell * cell * 37 % 101) as i64).collect();
        let replicas: Vec<i64> =
            (0..EXPERTS * ranks).map(|cell| (cell < EXPERTS || cell % 3 == 0).into()).collect();
        let policy = evermoe::dispatch::Policy::Even;
        for rank in [0, ranks / 2, ranks - 1] {
            let expected =
                evermoe::dispatch::split_tokens(&tokens, &replicas, EXPERTS, ranks, rank, policy).unwrap();
            let (mut send, mut receive) = (vec![9_i64; EXPERTS * ranks], vec![9_i64; EXPERTS * ranks]);
            let split = cuda::SplitTokens {
                tokens: at(&tokens),
                replicas: at(&replicas),
                send: at_mut(&mut send),
                receive: at_mut(&mut receive),
                num_experts: EXPERTS,
                num_ranks: ranks,
                rank,
            };
            // SAFETY: arrays of the stated lengths, which live until the stream is finished.
            unsafe { launcher.split_tokens(&split) }.unwrap();
            finish();
            assert_eq!((send, receive), (expected.send, expected.receive), "rank {rank} of {ranks}");
            // SAFETY: refused before it reads.
            let refused = unsafe { launcher.split_tokens(&cuda::SplitTokens { num_ranks: 945, ..split }) };
            assert!(refused.unwrap_err().to_string().contains("at most 944 ranks on CUDA, got 945"));
        }
    }
}

/// With the metadata of 8 choices, 8 bytes each, at most 100 bytes a token.
fn scratch_is_small() {
    for experts in [1, 8, 64, 256, 1000, 4096, 12_288] {
        let slots = 8 * 65_536;
        let per_token = cuda::Plan::scratch_bytes(slots, experts, 1) - 12 * experts;
        assert!(per_token as f64 / 65_536.0 + 64.0 <= 100.0, "{experts} experts: {per_token}");
    }
}

/// One and many experts, ranks and tiles; more warps than tables; no slots, and only unrouted ones.
fn plans(launcher: &Launcher) {
    let shapes = [(1, 1), (3, 128), (64, 64), (257, 3), (768, 1), (1000, 2), (4096, 128), (12_286, 1)];
    for (experts, ranks) in shapes {
        for slots in [0, 1, 40, 4097, 30_011] {
            plan_of(launcher, slots, experts, ranks);
        }
    }
    plan_of(launcher, (1 << 20) + 4097, 16, 3);
    plan::<i32, i32>(launcher, &[-1; 5000], &[0; 6], 3);
    let ids = [0_i32; 4];
    let refuse = |num_experts, num_ranks| {
        let plan = cuda::Plan {
            num_experts,
            num_ranks,
            ..plan_arguments(&ids, &[], 1, &mut [], &mut [0; 4], &mut [0_i32; 4])
        };
        // SAFETY: refused before it reads.
        unsafe { launcher.dispatch_plan(&plan) }.unwrap_err().to_string()
    };
    assert!(refuse(12_289, 1).contains("at most 12288 on CUDA, got 12289"));
    assert!(
        refuse(12_000, 288)
            .contains("fewer than 12288 experts and ranks together on CUDA, got 12000 and 288")
    );
}

fn plan_of(launcher: &Launcher, slots: usize, experts: usize, ranks: usize) {
    let ids: Vec<i64> =
        (0..slots as i64).map(|slot| slot * (slot >> 3) % 9973 % (experts as i64 + 1) - 1).collect();
    let mut counts = vec![0; experts * ranks];
    for (slot, &id) in ids.iter().enumerate().filter(|&(_, &id)| id >= 0) {
        counts[id as usize * ranks + slot / 5 % ranks] += 1;
    }
    let narrow: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    plan::<i64, i32>(launcher, &ids, &counts, experts);
    plan::<i32, i64>(launcher, &narrow, &counts, experts);
}

fn plan_arguments<I, P>(
    ids: &[I],
    send_counts: &[i64],
    num_experts: usize,
    scratch: &mut [u32],
    row_ids: &mut [P],
    positions: &mut [P],
) -> cuda::Plan {
    cuda::Plan {
        ids: at(ids),
        wide_ids: is_wide::<I>(),
        send_counts: at(send_counts),
        scratch: at_mut(scratch),
        row_ids: at_mut(row_ids),
        positions: at_mut(positions),
        wide: is_wide::<P>(),
        num_slots: ids.len(),
        num_experts,
        num_ranks: send_counts.len() / num_experts,
    }
}

fn plan<I: cpu::Id, P: cpu::Id>(
    launcher: &Launcher,
    ids: &[I],
    send_counts: &[i64],
    experts: usize,
) -> (Vec<P>, Vec<P>) {
    let (slots, ranks) = (ids.len(), send_counts.len() / experts);
    let mut expected = (vec![P::NONE; slots], vec![P::NONE; slots]);
    cpu::dispatch_plan(ids, send_counts, experts, &mut expected.0, &mut expected.1, &Serial).unwrap();
    let (mut row_ids, mut positions) = (vec![P::new(9); slots], vec![P::new(9); slots]);
    let mut scratch = vec![0x5a_u32; cuda::Plan::scratch_bytes(slots, experts, ranks) / 4 + 1];
    let plan = plan_arguments(ids, send_counts, experts, &mut scratch, &mut row_ids, &mut positions);
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { launcher.dispatch_plan(&plan) }.unwrap();
    finish();
    let case = format!("{slots} slots, {experts} experts, {ranks} ranks, wide: {}", is_wide::<P>());
    assert!((&row_ids, &positions) == (&expected.0, &expected.1), "{case}");
    assert_eq!(scratch.last(), Some(&0x5a), "a write past the scratch memory: {case}");
    (row_ids, positions)
}

fn is_wide<I>() -> bool {
    size_of::<I>() == 8
}

fn rows<I: cpu::Id>(launcher: &Launcher, x: &[bf16], width: usize, row_ids: &[I], positions: &[I]) {
    let mut expected = vec![bf16::ZERO; SLOTS * width];
    cpu::permute(x, row_ids, TOP_K, width, &mut expected, &Serial).unwrap();
    let mut rows = vec![bf16::ONE; SLOTS * width];
    let permute = cuda::Permute {
        x: at(x),
        row_ids: at(row_ids),
        positions: at(positions),
        wide_ids: is_wide::<I>(),
        wide_positions: is_wide::<I>(),
        out: at_mut(&mut rows),
        num_rows: SLOTS,
        row_bytes: width * 2,
        num_tokens: TOKENS,
        top_k: TOP_K,
    };
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { launcher.permute(&permute) }.unwrap();
    finish();
    assert_eq!(rows, expected);

    let weights: Vec<f32> = (0..SLOTS).map(|slot| (slot % 11) as f32 / 11.0).collect();
    let forward = cpu::Combine { rows: &rows, positions, weights: Some(&weights), width, top_k: TOP_K };
    let (mut expected, mut out) = (vec![bf16::ZERO; x.len()], vec![bf16::ONE; x.len()]);
    cpu::unpermute(&forward, &mut expected, &Serial).unwrap();
    let combine = cuda::Combine {
        rows: at(&rows),
        positions: at(positions),
        wide: is_wide::<I>(),
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
    finish();
    assert_eq!(out, expected);
    backward(launcher, x, &forward, combine);
}

fn backward<I: cpu::Id>(
    launcher: &Launcher,
    grad: &[bf16],
    forward: &cpu::Combine<'_, bf16, I>,
    combine: cuda::Combine,
) {
    let cpu::Combine { rows, positions, weights, width, top_k } = *forward;
    let weights = weights.unwrap();
    let mut expected = (vec![bf16::ZERO; rows.len()], vec![0.0; SLOTS]);
    let arguments = cpu::Backward { grad, rows, positions, weights, width, top_k };
    cpu::unpermute_backward(&arguments, &mut expected.0, &mut expected.1, &Serial).unwrap();
    let (mut grad_rows, mut grad_weights) = (vec![bf16::ONE; rows.len()], vec![9.0_f32; SLOTS]);
    let mut row_ids = vec![I::new(9); SLOTS];
    let backward = cuda::Backward {
        forward: cuda::Combine { out: at(grad), ..combine },
        row_ids: at_mut(&mut row_ids),
        grad_rows: at_mut(&mut grad_rows),
        grad_weights: at_mut(&mut grad_weights),
    };
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { launcher.unpermute_backward(&backward) }.unwrap();
    finish();
    assert_eq!((grad_rows, grad_weights), expected);
}

/// The gradient of step `t` on the device and on the host: none, float32 or bfloat16 in turn.
fn gradient<'a>(t: usize, wide: &'a [f32], narrow: &'a [bf16]) -> (GradientAt, Gradient<'a>) {
    match t % 3 {
        0 => (GradientAt::Zero, Gradient::Zero),
        1 => (GradientAt::F32(at(wide)), Gradient::F32(wide)),
        _ => (GradientAt::Bf16(at(narrow)), Gradient::Bf16(narrow)),
    }
}

/// Some values of -0.5 to 0.5.
fn draw(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 2003.0 - 0.5).collect()
}

/// More steps than one launch takes; with an offset, elements that cannot be read in packs.
fn adamw(launcher: &Launcher, len: usize, offset: usize) {
    const STEPS: usize = 11;
    let options = AdamWOptions { lr: 0.1, betas: [0.9, 0.99], eps: 1e-6, weight_decay: 0.1, maximize: false };
    let draw = |seed| draw(len + offset, seed);
    let wide = draw(1);
    let narrow: Vec<bf16> = draw(2).into_iter().map(bf16::from_f32).collect();
    let (mut state, mut expected) =
        ([draw(3), draw(4), vec![0.0; len + offset]], [draw(3), draw(4), vec![0.0; len + offset]]);
    let (mut device_steps, mut host_steps) = (Vec::new(), Vec::new());
    for t in 1..=STEPS {
        let (arithmetic, scale) = (Arithmetic::ALL[t % 4], if t % 2 == 0 { 1.0 } else { 3.0 });
        let powers = (arithmetic == Arithmetic::TorchCudaFused).then_some([0.5, 0.75]);
        let step = AdamWStep::with_arithmetic(arithmetic, &options, t as i64, powers, scale, 1.0).unwrap();
        let (at_device, on_host) = gradient(t, &wide[offset..], &narrow[offset..]);
        device_steps.push((step, at_device));
        host_steps.push((step, on_host));
    }
    let [p, m, v] = &mut expected;
    let [mut narrowed, mut expected_narrow] = [0; 2].map(|_| vec![bf16::ZERO; len + offset]);
    let rounded = Some(Rounded::Bf16(&mut expected_narrow[offset..]));
    cpu::adamw(&mut p[offset..], &mut m[offset..], &mut v[offset..], rounded, &host_steps, &Serial);
    let [p, m, v] = state.each_mut().map(|values| at_mut(&mut values[offset..]));
    let (rounded, steps) = (Some(RoundedAt::Bf16(at_mut(&mut narrowed[offset..]))), &device_steps);
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { launcher.adamw(&[cuda::AdamW { p, m, v, rounded, num_elements: len, steps }]) }.unwrap();
    finish();
    assert_eq!((state, narrowed), (expected, expected_narrow), "{len} elements at {offset}");
}

/// As [`adamw`]; with a buffer, and with none for steps without momentum.
fn sgd(launcher: &Launcher, len: usize, offset: usize) {
    const STEPS: usize = 11;
    let draw = |seed| draw(len + offset, seed);
    let wide = draw(1);
    let narrow: Vec<bf16> = draw(2).into_iter().map(bf16::from_f32).collect();
    for momentum in [0.0, 0.9] {
        let nesterov = momentum > 0.0;
        let options = SgdOptions { lr: 0.1, momentum, weight_decay: 0.1, nesterov, maximize: true, ..PLAIN };
        let (mut device_steps, mut host_steps) = (Vec::new(), Vec::new());
        for t in 0..STEPS {
            let step = SgdStep::new(SgdStep::ARITHMETICS[t % 2], &options, t == 0, 3.0, 0.5).unwrap();
            let (at_device, on_host) = gradient(t, &wide[offset..], &narrow[offset..]);
            device_steps.push((step, at_device));
            host_steps.push((step, on_host));
        }
        let (mut state, mut expected) = ([draw(3), draw(4)], [draw(3), draw(4)]);
        let [mut narrowed, mut expected_narrow] = [0; 2].map(|_| vec![f16::ZERO; len + offset]);
        let [p, buffer] = &mut expected;
        let buffer = (momentum > 0.0).then_some(&mut buffer[offset..]);
        let rounded = Some(Rounded::F16(&mut expected_narrow[offset..]));
        cpu::sgd(&mut p[offset..], buffer, rounded, &host_steps, &Serial).unwrap();
        let [p, buffer] = state.each_mut().map(|values| at_mut(&mut values[offset..]));
        let buffer = (momentum > 0.0).then_some(buffer);
        let rounded = Some(RoundedAt::F16(at_mut(&mut narrowed[offset..])));
        let mut arguments = cuda::Sgd { p, buffer, rounded, num_elements: len, steps: &device_steps };
        // SAFETY: arrays of the stated lengths, which live until the stream is finished.
        unsafe { launcher.sgd(&[arguments]) }.unwrap();
        finish();
        assert_eq!(
            (&state, &narrowed),
            (&expected, &expected_narrow),
            "{len} at {offset}, momentum {momentum}"
        );
        arguments.buffer = None;
        // SAFETY: as above; refused before it launches where a buffer is missing.
        let without = unsafe { launcher.sgd(&[arguments]) };
        finish();
        assert_eq!(without.is_err(), momentum > 0.0);
    }
}

/// Tensors with one step each, of which some are empty and some cannot be read in packs, with `rows` different rows of
/// numbers. AdamW's launches are counted; SGD needs the same number.
fn groups(driver: &Driver, count: usize, rows: usize, launches: usize) {
    let launcher = driver.launcher();
    let options = AdamWOptions { lr: 0.1, betas: [0.9, 0.99], eps: 1e-6, weight_decay: 0.1, maximize: false };
    let step = |i: usize| AdamWStep::new(&options, (i % rows) as i64 + 1, 3.0, 0.5).unwrap();
    let sgd = SgdOptions { lr: 0.1, momentum: 0.9, weight_decay: 0.1, nesterov: true, ..PLAIN };
    let sgd = |i: usize| SgdStep::new(Arithmetic::Evermoe, &sgd, i.is_multiple_of(rows), 3.0, 0.5).unwrap();
    let len = |i: usize| [1, 7, 8, 2051, 20_011, 13][i % 6];
    let arrays = |i: usize| [draw(len(i) + 1, i), draw(len(i) + 1, i + 1), vec![0.0; len(i) + 1]];
    let wide: Vec<_> = (0..count).map(|i| draw(len(i) + 1, 2 * i)).collect();
    let narrow: Vec<Vec<bf16>> =
        wide.iter().map(|g| g.iter().map(|&g| bf16::from_f32(g)).collect()).collect();
    let pair = |i: usize| gradient(i, &wide[i][i % 2..][..len(i)], &narrow[i][i % 2..][..len(i)]);
    let mut state: Vec<_> = (0..count).map(arrays).collect();
    let mut expected = state.clone();
    for (i, [p, m, v]) in expected.iter_mut().enumerate() {
        let part = i % 2..i % 2 + len(i);
        let steps = [(step(i), pair(i).1)];
        cpu::adamw(&mut p[part.clone()], &mut m[part.clone()], &mut v[part.clone()], None, &steps, &Serial);
        cpu::sgd(&mut p[part.clone()], Some(&mut m[part]), None, &[(sgd(i), pair(i).1)], &Serial).unwrap();
    }
    let steps: Vec<_> = (0..count).map(|i| [(step(i), pair(i).0)]).collect();
    let sgd_steps: Vec<_> = (0..count).map(|i| [(sgd(i), pair(i).0)]).collect();
    let (mut tensors, mut sgd_tensors) = (Vec::new(), Vec::new());
    for (i, arrays) in state.iter_mut().enumerate() {
        let [p, m, v] = arrays.each_mut().map(|values| at_mut(&mut values[i % 2..]));
        tensors.push(cuda::AdamW { p, m, v, rounded: None, num_elements: len(i), steps: &steps[i] });
        sgd_tensors.push(cuda::Sgd {
            p,
            buffer: Some(m),
            rounded: None,
            num_elements: len(i),
            steps: &sgd_steps[i],
        });
        tensors.push(cuda::AdamW { num_elements: 0, ..tensors[2 * i] });
    }
    let before = driver.launches();
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { launcher.adamw(&tensors) }.unwrap();
    assert_eq!(driver.launches() - before, launches, "{count} tensors, {rows} rows");
    // SAFETY: as above.
    unsafe { launcher.sgd(&sgd_tensors) }.unwrap();
    finish();
    assert!(state == expected, "{count} tensors, {rows} rows");
}

/// The tensors are stepped one after the other; the gradient is the first one's result.
fn shared_memory(driver: &Driver) {
    let step = SgdStep::new(Arithmetic::Evermoe, &PLAIN, false, 1.0, 1.0).unwrap();
    let (mut memory, ones) = (vec![3.0_f32; 4000], vec![2.0_f32; 3000]);
    let p = at_mut(&mut memory);
    let steps = [[(step, GradientAt::F32(at(&ones)))], [(step, GradientAt::F32(p))]];
    let tensors = [(p, 3000, &steps[0]), (p + 4 * 3000, 1000, &steps[1])]
        .map(|(p, num_elements, steps)| cuda::Sgd { p, buffer: None, rounded: None, num_elements, steps });
    let before = driver.launches();
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { driver.launcher().sgd(&tensors) }.unwrap();
    finish();
    assert_eq!(driver.launches() - before, 2);
    assert_eq!((&memory[..3000], &memory[3000..]), (&[2.0; 3000][..], &[2.0; 1000][..]));
}
