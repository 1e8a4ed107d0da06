//! SGD compared with its recipe, element by element; several steps at once compared with one after the other.

use evermoe::cpu::{Arithmetic, Gradient, Serial, SgdOptions, SgdStep, sgd};
use proptest::prelude::*;

const STEPS: usize = 3;

/// The recipe as the module's documentation has it. `in_tail`: among the last `len % 8` elements.
fn recipe(step: &SgdStep, g: f32, in_tail: bool, [p, buffer]: [f32; 2]) -> [f32; 2] {
    let SgdStep {
        arithmetic,
        loss_scale,
        factor,
        decay,
        momentum,
        one_minus_dampening,
        lr,
        is_first,
        nesterov,
    } = *step;
    let g = (g / loss_scale) * factor;
    let g = if decay == 0.0 { g } else { f32::mul_add(p, decay, g) };
    if momentum == 0.0 {
        return [f32::mul_add(g, -lr, p), buffer];
    }
    let b = match arithmetic {
        _ if is_first => g,
        Arithmetic::TorchCpuFused if in_tail => f32::mul_add(buffer, momentum, g * one_minus_dampening),
        _ => f32::mul_add(g, one_minus_dampening, buffer * momentum),
    };
    [f32::mul_add(if nesterov { f32::mul_add(b, momentum, g) } else { b }, -lr, p), b]
}

/// Which NaN comes out is the processor's choice.
fn bits(value: f32) -> u32 {
    if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() }
}

/// Any float at all, or one of a size that training has.
fn float() -> impl Strategy<Value = f32> {
    prop_oneof![any::<u32>().prop_map(f32::from_bits), -2.0_f32..2.0, Just(0.0), Just(-0.0)]
}

fn step() -> impl Strategy<Value = SgdStep> {
    let momentum = prop_oneof![Just((0.0, 0.0)), (0.0..1.5, Just(0.0)), (0.0..1.0, -1.0..1.0)];
    let scaling = prop_oneof![Just((1.0, 1.0)), (1e-3..65536.0, 0.0..2.0)];
    let decay = prop_oneof![Just(0.0), 0.0..1.0];
    (momentum, 0.0..10.0, decay, scaling, any::<[bool; 4]>()).prop_map(
        |((momentum, dampening), lr, weight_decay, (scale, clip), [is_first, nesterov, maximize, tail])| {
            let nesterov = nesterov && momentum > 0.0 && dampening == 0.0;
            let options = SgdOptions { lr, momentum, dampening, weight_decay, nesterov, maximize };
            SgdStep::new(SgdStep::ARITHMETICS[usize::from(tail)], &options, is_first, scale, clip).unwrap()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Lengths around the blocks, of 2048 elements; with a buffer, and without one where no step needs it.
    #[test]
    fn equals_the_recipe(
        len in prop_oneof![0..70_usize, 2040..2056_usize, Just(5003)],
        pool in prop::collection::vec(float(), 300),
        steps in prop::collection::vec((step(), any::<bool>()), STEPS),
    ) {
        let draw = |stride: usize| -> Vec<f32> { (0..len).map(|i| pool[i * stride % 300]).collect() };
        let gradient = draw(7);
        let steps: Vec<_> = steps.iter().map(|&(step, zero)| {
            (step, if zero { Gradient::Zero } else { Gradient::F32(&gradient) })
        }).collect();
        let (mut p, mut buffer) = (draw(11), draw(13));
        let mut expected: Vec<_> = (0..len).map(|i| [p[i], buffer[i]]).collect();
        let (mut one_by_one, mut alone) = ((p.clone(), buffer.clone()), p.clone());
        for (step, gradient) in &steps {
            sgd(&mut one_by_one.0, Some(&mut one_by_one.1), None, &[(*step, *gradient)], &Serial).unwrap();
            for (i, state) in expected.iter_mut().enumerate() {
                let g = if let Gradient::F32(values) = gradient { values[i] } else { 0.0 };
                *state = recipe(step, g, i >= len - len % 8, *state);
            }
        }
        sgd(&mut p, Some(&mut buffer), None, &steps, &Serial).unwrap();
        for (i, expected) in expected.iter().enumerate() {
            let expected = expected.map(bits);
            prop_assert_eq!([p[i], buffer[i]].map(bits), expected, "element {} of {}", i, len);
            prop_assert_eq!([one_by_one.0[i], one_by_one.1[i]].map(bits), expected);
        }
        let untouched = alone.clone();
        if steps.iter().all(|(step, _)| step.momentum == 0.0) {
            sgd(&mut alone, None, None, &steps, &Serial).unwrap();
            prop_assert!(alone.iter().zip(&p).all(|(one, two)| bits(*one) == bits(*two)));
        } else {
            let refusal = sgd(&mut alone, None, None, &steps, &Serial).unwrap_err().to_string();
            prop_assert!(refusal.starts_with("buffer: expected one for a step with momentum"));
            prop_assert!(alone.iter().zip(&untouched).all(|(one, two)| one.to_bits() == two.to_bits()));
        }
    }

    #[test]
    fn numbers_of_a_step_travel_as_an_array(step in step()) {
        prop_assert_eq!(SgdStep::from_array(step.to_array()).unwrap(), step);
    }
}

#[test]
fn numbers_that_are_no_step_are_refused() {
    let fine = [0.0, 1.0, 1.0, 0.0, 0.9, 1.0, 0.1, 0.0, 0.0];
    assert!(SgdStep::from_array(fine).is_ok());
    for (place, number) in [(0, 2.0), (0, 0.5), (0, f32::NAN), (7, 2.0), (8, -1.0)] {
        let mut wrong = fine;
        wrong[place] = number;
        assert!(SgdStep::from_array(wrong).unwrap_err().to_string().starts_with("steps: expected"));
    }
}

#[test]
fn numbers_out_of_range_are_named() {
    let fine = SgdOptions {
        lr: 0.1,
        momentum: 0.9,
        dampening: 0.0,
        weight_decay: 0.1,
        nesterov: true,
        maximize: false,
    };
    let refusal = |change: &dyn Fn(&mut SgdOptions), arithmetic, scale, clip| {
        let mut options = fine;
        change(&mut options);
        SgdStep::new(arithmetic, &options, false, scale, clip).unwrap_err().to_string()
    };
    let ours = Arithmetic::Evermoe;
    for bad in [-1.0, f64::NAN, f64::INFINITY, 1e300] {
        assert!(refusal(&|options| options.lr = bad, ours, 1.0, 1.0).starts_with("lr: expected"));
        assert!(refusal(&|options| options.momentum = bad, ours, 1.0, 1.0).starts_with("momentum: expected"));
        assert!(refusal(&|options| options.weight_decay = bad, ours, 1.0, 1.0).starts_with("weight_decay:"));
        assert!(refusal(&|_| (), ours, bad, 1.0).starts_with("loss_scale: expected"));
        assert!(refusal(&|_| (), ours, 1.0, bad).starts_with("clip: expected"));
    }
    assert!(
        refusal(&|options| options.dampening = f64::NAN, ours, 1.0, 1.0).starts_with("dampening: expected")
    );
    assert!(refusal(&|options| options.dampening = 0.1, ours, 1.0, 1.0).starts_with("nesterov: expected"));
    assert!(refusal(&|_| (), Arithmetic::TorchCudaFused, 1.0, 1.0).starts_with("arithmetic: expected"));
}
