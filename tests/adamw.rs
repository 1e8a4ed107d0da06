//! AdamW compared with its recipe, element by element; several steps at once compared with one after the other.

use evermoe::cpu::{AdamWOptions, AdamWStep, Arithmetic, Gradient, Parallel, Serial, adamw};
use half::bf16;
use proptest::prelude::*;
use std::ops::Range;

const STEPS: usize = 3;

/// Gives out the items one by one, the last one first.
struct OneByOne;

impl Parallel for OneByOne {
    fn run(&self, len: usize, _grain: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
        (0..len).rev().for_each(|item| body(item..item + 1));
    }
}

/// The recipes as the module's documentation has them. `in_tail`: among the last `len % 8` elements.
fn recipe(step: &AdamWStep, g: f32, in_tail: bool, [p, m, v]: [f32; 3]) -> [f32; 3] {
    let AdamWStep {
        arithmetic,
        loss_scale,
        factor,
        decay,
        one_minus_beta1,
        one_minus_beta2,
        beta2,
        step_size,
        bias_correction2_sqrt,
        eps,
    } = *step;
    let g = (g / loss_scale) * factor;
    let q = g * g;
    if arithmetic == Arithmetic::TorchCudaFused {
        let p = if decay.to_bits() == 0 { p } else { f32::mul_add(p, decay, p) };
        let m = f32::mul_add(m, one_minus_beta1, f32::mul_add(g, -one_minus_beta1, g));
        let v = f32::mul_add(v, beta2, f32::mul_add(q, -beta2, q));
        return [p - (m * step_size) / (v.sqrt() / bias_correction2_sqrt + eps), m, v];
    }
    let m = if one_minus_beta1 < 0.5 {
        f32::mul_add(one_minus_beta1, g - m, m)
    } else {
        f32::mul_add(-(1.0 - one_minus_beta1), g - m, g)
    };
    let v = match arithmetic {
        Arithmetic::TorchCudaForeach => f32::mul_add(q, one_minus_beta2, v * beta2),
        Arithmetic::TorchCpuFused if in_tail => f32::mul_add(v, beta2, (one_minus_beta2 * g) * g),
        _ => f32::mul_add(one_minus_beta2 * g, g, v * beta2),
    };
    let (p, denominator) = (p * decay, v.sqrt() / bias_correction2_sqrt + eps);
    let p = match arithmetic {
        Arithmetic::TorchCudaForeach => f32::mul_add(m / denominator, -step_size, p),
        _ => p - (step_size * m) / denominator,
    };
    [p, m, v]
}

/// Which NaN comes out is the processor's choice.
fn bits(value: f32) -> u32 {
    if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() }
}

/// Any float at all, or one of a size that training has.
fn float() -> impl Strategy<Value = f32> {
    prop_oneof![any::<u32>().prop_map(f32::from_bits), -2.0_f32..2.0, Just(0.0), Just(-0.0)]
}

fn options() -> impl Strategy<Value = AdamWOptions> {
    let beta = || prop_oneof![Just(0.0), Just(0.5), Just(0.9), Just(0.999), 0.0..1.0];
    let decay = prop_oneof![Just(0.0), 0.0..1.0];
    (0.0..10.0, beta(), beta(), prop_oneof![Just(0.0), Just(1e-8)], decay, any::<bool>()).prop_map(
        |(lr, beta1, beta2, eps, weight_decay, maximize)| AdamWOptions {
            lr,
            betas: [beta1, beta2],
            eps,
            weight_decay,
            maximize,
        },
    )
}

fn step() -> impl Strategy<Value = AdamWStep> {
    let scaling = prop_oneof![Just((1.0, 1.0)), (1e-3..65536.0, 0.0..2.0)];
    (options(), 1..2000_i64, scaling, 0..4_usize).prop_map(|(options, t, (scale, clip), arithmetic)| {
        let arithmetic = Arithmetic::ALL[arithmetic];
        let powers = options.betas.map(|beta| (beta as f32).powf(t as f32));
        let powers = (arithmetic == Arithmetic::TorchCudaFused).then_some(powers);
        AdamWStep::with_arithmetic(arithmetic, &options, t, powers, scale, clip).unwrap()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Lengths around the blocks, of 2048 elements, and steps with gradients of each kind.
    #[test]
    fn equals_the_recipe(
        len in prop_oneof![0..70_usize, 2040..2056_usize, Just(4096), Just(5003)],
        pool in prop::collection::vec(float(), 300),
        steps in prop::collection::vec((step(), 0..3_usize), STEPS),
    ) {
        let draw = |stride: usize| -> Vec<f32> { (0..len).map(|i| pool[i * stride % 300]).collect() };
        let wide = draw(7);
        let narrow: Vec<bf16> = wide.iter().map(|&value| bf16::from_f32(value)).collect();
        let steps: Vec<_> = steps.iter().map(|&(step, kind)| {
            (step, [Gradient::Zero, Gradient::F32(&wide), Gradient::Bf16(&narrow)][kind])
        }).collect();
        let (mut p, mut m, mut v) = (draw(11), draw(13), draw(17));
        let mut expected: Vec<_> = (0..len).map(|i| [p[i], m[i], v[i]]).collect();
        let mut one_by_one = (p.clone(), m.clone(), v.clone());
        for (step, gradient) in &steps {
            adamw(&mut one_by_one.0, &mut one_by_one.1, &mut one_by_one.2, None, &[(*step, *gradient)], &Serial);
            for (i, state) in expected.iter_mut().enumerate() {
                let g = match gradient {
                    Gradient::Zero => 0.0,
                    Gradient::F32(values) => values[i],
                    Gradient::Bf16(values) => values[i].to_f32(),
                };
                *state = recipe(step, g, i >= len - len % 8, *state);
            }
        }
        adamw(&mut p, &mut m, &mut v, None, &steps, &OneByOne);
        for (i, expected) in expected.iter().enumerate() {
            let expected = expected.map(bits);
            prop_assert_eq!([p[i], m[i], v[i]].map(bits), expected, "element {} of {}", i, len);
            prop_assert_eq!([one_by_one.0[i], one_by_one.1[i], one_by_one.2[i]].map(bits), expected);
        }
    }

    #[test]
    fn numbers_of_a_step_travel_as_an_array(step in step()) {
        prop_assert_eq!(AdamWStep::from_array(step.to_array()).unwrap(), step);
    }
}

/// A learning rate of 0 decays all the same in torch's CUDA kernel, which turns −0 into +0; no weight decay does not.
#[test]
fn decay_by_nothing_is_a_decay() {
    let zero_after = |weight_decay| {
        let options = AdamWOptions { lr: 0.0, betas: [0.5, 0.5], eps: 1.0, weight_decay, maximize: false };
        let step =
            AdamWStep::with_arithmetic(Arithmetic::TorchCudaFused, &options, 1, Some([0.5, 0.5]), 1.0, 1.0)
                .unwrap();
        let mut p = [-0.0];
        adamw(&mut p, &mut [1.0], &mut [0.0], None, &[(step, Gradient::F32(&[1.0]))], &Serial);
        p[0].to_bits()
    };
    assert_eq!([zero_after(0.1), zero_after(0.0)], [0.0_f32.to_bits(), (-0.0_f32).to_bits()]);
}

#[test]
fn no_step_changes_nothing() {
    let (mut p, mut m, mut v) = ([1.0], [2.0], [3.0]);
    adamw(&mut p, &mut m, &mut v, None, &[], &Serial);
    assert_eq!((p, m, v), ([1.0], [2.0], [3.0]));
}

#[test]
fn numbers_out_of_range_are_named() {
    let fine = AdamWOptions { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, maximize: false };
    let refusal = |change: &dyn Fn(&mut AdamWOptions), t, scale, clip| {
        let mut options = fine;
        change(&mut options);
        AdamWStep::new(&options, t, scale, clip).unwrap_err().to_string()
    };
    for bad in [-1.0, f64::NAN, f64::INFINITY, 1e300] {
        assert!(refusal(&|options| options.lr = bad, 1, 1.0, 1.0).starts_with("lr: expected"));
        assert!(refusal(&|options| options.eps = bad, 1, 1.0, 1.0).starts_with("eps: expected"));
        assert!(refusal(&|options| options.weight_decay = bad, 1, 1.0, 1.0).starts_with("weight_decay:"));
        assert!(refusal(&|options| options.betas[0] = bad, 1, 1.0, 1.0).starts_with("betas: expected"));
        assert!(refusal(&|options| options.betas[1] = bad, 1, 1.0, 1.0).starts_with("betas: expected"));
        assert!(refusal(&|_| (), 1, bad, 1.0).starts_with("loss_scale: expected"));
        assert!(refusal(&|_| (), 1, 1.0, bad).starts_with("clip: expected"));
    }
    assert!(refusal(&|_| (), 1, 0.0, 1.0).starts_with("loss_scale: expected"));
    assert!(refusal(&|options| options.betas[1] = 1.0, 1, 1.0, 1.0).starts_with("betas: expected"));
    assert!(refusal(&|_| (), 0, 1.0, 1.0).starts_with("t: expected"));
    assert!(refusal(&|_| (), -1, 1.0, 1.0).starts_with("t: expected"));
}
