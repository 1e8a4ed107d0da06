//! The interval of versions, compared with all possible intervals.

use evermoe::schedule::*;
use proptest::prelude::*;

const MOST: usize = 40;

proptest! {
    #[test]
    fn no_period_loses_less(
        windows in 0.0_f64..0.5, copy in 0.0_f64..9.0, retrieve in 0.0_f64..9.0, failures in 0.0_f64..0.2,
    ) {
        let found = copy_period(1.0, windows, copy, retrieve, failures, MOST).unwrap();
        let loss = |n: usize| {
            let delay = (copy - n as f64 * windows).max(0.0);
            delay / n as f64 + failures * (1.5 * n as f64 + retrieve)
        };
        let least = (1..=MOST).map(loss).fold(f64::INFINITY, f64::min);
        prop_assert!(loss(found.steps) <= least + 1e-9, "{found:?}, {least}");
        prop_assert!((found.wasted - 1.5 * found.steps as f64 - retrieve).abs() < 1e-9);
    }
}

#[test]
fn a_version_that_fits_is_made_in_each_step_whatever_a_failure_costs() {
    for failures in [0.0, 1e-4, 1.0] {
        let period = copy_period(1.0, 2.0, 2.0, 3.0, failures, MOST).unwrap();
        assert_eq!(period, Period { steps: 1, delay: 0.0, wasted: 4.5 });
    }
}

#[test]
fn frequent_failures_are_worth_a_delay() {
    let steps = |failures| copy_period(1.0, 0.1, 1.0, 0.0, failures, MOST).unwrap().steps;
    assert_eq!([steps(1e-6), steps(0.1), steps(1.0)], [10, 3, 1]);
}

#[test]
fn what_is_no_time_is_refused() {
    for wrong in [f64::NAN, f64::INFINITY, -1.0] {
        for place in 0..5 {
            let mut times = [1.0; 5];
            times[place] = wrong;
            let [step, windows, copy, retrieve, failures] = times;
            assert!(copy_period(step, windows, copy, retrieve, failures, MOST).is_err());
        }
    }
    assert!(copy_period(0.0, 1.0, 1.0, 1.0, 1.0, MOST).is_err());
    for most in [0, 4097] {
        assert!(copy_period(1.0, 1.0, 1.0, 1.0, 1.0, most).is_err());
    }
}
