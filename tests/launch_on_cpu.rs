//! The launchers, with their grids and argument lists, against a driver that runs the kernels' source on the CPU.
//!
//! Needs g++ on x86-64 and a build with kernels; passes without a word otherwise.
#![cfg(all(feature = "cuda", target_arch = "x86_64", target_os = "linux"))]

use evermoe::cpu::{self, AdamWOptions, AdamWStep, Gradient, Profile, Serial, SgdOptions, SgdStep};
use evermoe::cuda::{self, FloatType, GradientAt, Launcher};
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

/// Builds the fake driver and loads it under the name that cudarc asks for first.
fn launcher() -> Option<Launcher> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if !cuda::has_kernels() || Command::new("g++").arg("--version").output().is_err() {
        return None;
    }
    let emulator = root.join("tests/cuda_on_cpu");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let library = folder.path().join("libcuda.so");
    let mut command = Command::new("g++");
    command.args([
        "-std=c++17",
        "-O1",
        "-mf16c",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-shared",
        "-fPIC",
    ]);
    command
        .args(["-Wl,-soname,libcuda.so", "-include"])
        .arg(emulator.join("cuda_on_cpu.h"))
        .args(["-x", "c++"]);
    command.args(["histogram", "dispatch", "replay"].map(|file| root.join(format!("kernels/{file}.cu"))));
    command.args(["cuda_on_cpu.cpp", "fake_driver.cpp"].map(|file| emulator.join(file)));
    assert!(command.arg("-o").arg(&library).status().expect("g++").success());
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
        sgd(&launcher, len, offset);
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
    let (mut there, mut here) = (Vec::new(), Vec::new());
    for t in 1..=STEPS {
        let (profile, scale) = (Profile::ALL[t % 4], if t % 2 == 0 { 1.0 } else { 3.0 });
        let powers = (profile == Profile::TorchCudaFused).then_some([0.5, 0.75]);
        let step = AdamWStep::with_profile(profile, &options, t as i64, powers, scale, 1.0).unwrap();
        let (at_device, on_host) = gradient(t, &wide[offset..], &narrow[offset..]);
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

/// As [`adamw`]; with a buffer, and with none for steps without momentum.
fn sgd(launcher: &Launcher, len: usize, offset: usize) {
    const STEPS: usize = 11;
    let draw = |seed| draw(len + offset, seed);
    let wide = draw(1);
    let narrow: Vec<bf16> = draw(2).into_iter().map(bf16::from_f32).collect();
    for momentum in [0.0, 0.9] {
        let nesterov = momentum > 0.0;
        let options =
            SgdOptions { lr: 0.1, momentum, dampening: 0.0, weight_decay: 0.1, nesterov, maximize: true };
        let (mut there, mut here) = (Vec::new(), Vec::new());
        for t in 0..STEPS {
            let step = SgdStep::new(SgdStep::PROFILES[t % 2], &options, t == 0, 3.0, 0.5).unwrap();
            let (at_device, on_host) = gradient(t, &wide[offset..], &narrow[offset..]);
            there.push((step, at_device));
            here.push((step, on_host));
        }
        let (mut state, mut expected) = ([draw(3), draw(4)], [draw(3), draw(4)]);
        let [p, buffer] = &mut expected;
        let buffer = (momentum > 0.0).then_some(&mut buffer[offset..]);
        cpu::sgd(&mut p[offset..], buffer, &here, &Serial).unwrap();
        let [p, buffer] = state.each_mut().map(|values| at_mut(&mut values[offset..]));
        let buffer = (momentum > 0.0).then_some(buffer);
        let mut arguments = cuda::Sgd { p, buffer, num_elements: len, steps: &there };
        // SAFETY: arrays of the stated lengths; the fake driver is synchronous.
        unsafe { launcher.sgd(&arguments) }.unwrap();
        assert_eq!(state, expected, "{len} elements at {offset}, momentum {momentum}");
        arguments.buffer = None;
        // SAFETY: as above; refused before it launches where a buffer is missing.
        let without = unsafe { launcher.sgd(&arguments) };
        assert_eq!(without.is_err(), momentum > 0.0);
    }
}
