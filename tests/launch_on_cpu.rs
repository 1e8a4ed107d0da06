//! The launchers, with their grids and argument lists, against a driver that runs the kernels' source on the CPU.
//!
//! Needs g++ on x86-64 and a build with kernels; passes without a word otherwise.
#![cfg(all(feature = "cuda", target_arch = "x86_64", target_os = "linux"))]

use driver::{Driver, finish};
use evermoe::cpu::{self, AdamWOptions, AdamWStep, Gradient, Serial};
use evermoe::cuda::{self, FloatType, GradientAt, Launcher};
use half::bf16;

#[path = "cuda_on_cpu/driver.rs"]
#[allow(dead_code, reason = "each test uses its part")]
mod driver;

const TOKENS: usize = 301;
const TOP_K: usize = 2;
const EXPERTS: usize = 5;
const RANKS: usize = 3;
const SLOTS: usize = TOKENS * TOP_K;

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

// One test: there is one driver in a process.
#[test]
fn launchers_agree_with_the_cpu() {
    let Some(driver) = Driver::load() else { return };
    let launcher = driver.launcher();
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
}

fn histogram(launcher: &Launcher, ids: &[i32]) {
    let (mut expected, mut counts) = ([0_i64; EXPERTS], [9_i64; EXPERTS]);
    cpu::histogram(ids, &mut expected, &Serial).unwrap();
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { launcher.histogram(at(ids), false, at_mut(&mut counts), SLOTS, EXPERTS) }.unwrap();
    finish();
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
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { launcher.dispatch_plan(&plan) }.unwrap();
    finish();
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
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { launcher.unpermute_backward(&backward) }.unwrap();
    finish();
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
    // SAFETY: arrays of the stated lengths, which live until the stream is finished.
    unsafe { launcher.adamw(&cuda::AdamW { p, m, v, num_elements: len, steps: &there }) }.unwrap();
    finish();
    assert_eq!(state, expected, "{len} elements at {offset}");
}
