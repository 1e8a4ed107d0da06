//! Chunk plans of small requests, computed by hand, and of the largest numbers.

use super::case::{STEP, check_plan, complete, placed, simple};
use super::idle;
use evermoe::schedule::*;

#[test]
fn baft_keeps_units_whole_and_fills_each_window_best() {
    // 9 seconds take 5 + 4, not 7; 8 take 7; the 12 are too large for any and are cut to 9 and 3.
    let mut case = complete(simple(&[(7, &[0]), (5, &[0]), (4, &[0])], &[(0.0, 9.0), (20.0, 8.0)], 0.0));
    let plan = case.plan(Policy::Baft);
    assert_eq!(
        placed(&case, &plan),
        [(0, Some(0.0), 1, 0, 5), (0, Some(0.0), 2, 0, 4), (0, Some(20.0), 0, 0, 7)]
    );
    case.pieces[0].bytes = 12;
    let plan = case.plan(Policy::Baft);
    assert_eq!(
        placed(&case, &plan),
        [(0, Some(0.0), 0, 0, 9), (0, Some(20.0), 1, 0, 5), (0, Some(20.0), 0, 9, 3), (0, None, 2, 0, 4)]
    );
    assert_eq!((plan.reason.delay_seconds, plan.reason.steps_in_windows), (4.0, Some(2)));
}

#[test]
fn auto_takes_whole_units_where_nothing_else_is_in_time() {
    // Cut into the windows in order, the first unit needs a second chunk, for which one step has no time.
    let mut case = complete(simple(&[(1, &[0]), (3, &[0])], &[(0.0, 5.0), (20.0, 3.0)], 2.0));
    assert_eq!(case.plan(Policy::Auto).reason.steps_per_version, 2);
    case.max_steps = 1;
    assert_eq!(case.plan(Policy::Gemini).reason.delay_seconds, 4.0);
    assert!(case.plan(Policy::Baft).reason.fits && case.plan(Policy::Auto).reason.fits);
}

#[test]
fn auto_serves_first_whoever_has_the_first_windows() {
    let mut case = simple(&[(4, &[0, 1])], &[(0.0, 10.0)], 0.0);
    case.receivers = vec![(0, vec![(5.0, 5.0)], 0.0), (1, vec![(0.0, 5.0)], 0.0)];
    let plan = case.plan(Policy::Auto);
    assert_eq!(plan.chunks.iter().map(|chunk| chunk.destination).collect::<Vec<_>>(), [1, 0]);
    assert_eq!(
        (plan.reason.steps_per_version, case.plan(Policy::Gemini).reason.steps_in_windows),
        (1, Some(2))
    );
}

/// ⌊n · window ÷ (bytes ÷ rate)⌋ chunks, in whole numbers: n · window · rate ÷ bytes.
#[test]
fn moetion_sends_the_whole_quotient_of_chunks_in_windows() {
    for (pieces, bytes, window, rate) in [
        (25, 5, 10, 3), // 6 exactly; in rounded seconds a little less
        (25, 5, 9, 3),
        (49, 1, 1, 49),
        (10, 3, 7, 3),
        (7, 11, 13, 3),
        (30, 7, 14, 6),
        (99, 13, 26, 7),
    ] {
        let unit: (u64, &[usize]) = (bytes, &[0]);
        let mut case = complete(simple(&vec![unit; pieces], &[(0.0, f64::from(window))], 0.0));
        case.link.beta = f64::from(rate);
        case.max_steps = 1;
        let plan = case.plan(Policy::Moetion);
        let sent = plan.chunks.iter().filter(|chunk| chunk.window.is_some()).count() as u64;
        let (n, available) = (pieces as u64, window as u64 * rate as u64);
        let quota = (n * available / (n * bytes)).min(n);
        assert_eq!(sent, quota, "{pieces} pieces × {bytes} bytes, {window} s, {rate} bytes a second");
    }
}

#[test]
fn without_windows_what_is_sent_is_spread_over_the_steps() {
    let mut case = simple(&[(40, &[0, 1])], &[], 0.0);
    case.memory.bytes = 10;
    let plan = case.plan(Policy::Auto);
    let steps: Vec<usize> = plan.chunks.iter().map(|chunk| chunk.step).collect();
    assert_eq!(steps, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!((plan.reason.delay_seconds, plan.reason.steps_in_windows), (10.0, None));
    assert_eq!(case.plan(Policy::Gemini).reason.delay_seconds, 80.0);
}

#[test]
fn small_chunks_use_windows_that_are_too_short_to_drain_large_ones() {
    // Two sub-buffers of 32 bytes: full ones leave 33 seconds from start to start, those of 2 bytes only 3.
    let mut case = simple(&[(6, &[0])], &[(0.0, 3.0), (50.0, 3.0)], 0.0);
    case.memory = Memory { bytes: 64, buffers: 2, drain: Some(Link { alpha: 1.0, beta: 1.0 }) };
    let plan = case.plan(Policy::Auto);
    check_plan(&case, &plan, Policy::Auto);
    assert_eq!((plan.reason.fits, plan.reason.steps_per_version), (true, 2));
    assert_eq!(case.plan(Policy::Gemini).reason.outside_bytes, 6);
}

#[test]
fn a_thousand_sizes_are_still_a_plan() {
    let bytes: Vec<u64> = (0..1000).map(|unit: u64| 1 + unit * 7919 % 1009).collect();
    let pieces: Vec<(u64, &[usize])> = bytes.iter().map(|&bytes| (bytes, &[0_usize][..])).collect();
    let mut case = complete(simple(&pieces, &[(0.0, 40.0), (45.0, 50.0)], 0.001));
    case.link.beta = 1000.0;
    case.memory.bytes = 5000;
    let plan = case.plan(Policy::Baft);
    check_plan(&case, &plan, Policy::Baft);
    assert!(plan.reason.used_seconds > 89.9, "{}", plan.reason);
}

#[test]
fn more_bytes_than_can_be_counted_are_refused() {
    let case = simple(&[(u64::MAX, &[0]), (1, &[0])], &[], 0.0);
    let windows = idle(&case.own, STEP);
    let error = plan_chunks(&case.request(&windows, &[], Policy::Auto)).unwrap_err().to_string();
    assert!(error.starts_with("pieces: expected fewer than 2^64 bytes"), "{error}");
}

#[test]
fn nothing_to_send_fits() {
    for policy in Policy::ALL {
        let plan = complete(simple(&[(0, &[0])], &[], 0.0)).plan(policy);
        assert_eq!((plan.chunks.len(), plan.reason.fits, plan.reason.steps_per_version), (0, true, 1));
    }
}

#[test]
fn numbers_of_any_size() {
    let mut case = complete(simple(&[(u64::MAX, &[0])], &[(0.0, 1.0)], 0.0));
    case.memory = Memory { bytes: u64::MAX, buffers: 4, drain: Some(Link { alpha: 0.0, beta: f64::MAX }) };
    for beta in [f64::MAX, 1.0] {
        case.link.beta = beta;
        for policy in Policy::ALL {
            let plan = case.plan(policy);
            assert_eq!(
                plan.chunks.iter().map(|chunk| u128::from(chunk.bytes)).sum::<u128>(),
                u128::from(u64::MAX)
            );
        }
    }
}
