//! Average tokens of an expert per step with exponential decay: the load that placements are planned for.

use crate::ensure;
use crate::error::Result;

/// Exponential moving average of every expert's tokens, per layer, with bias correction.
///
/// A layer's state is the discounted sum of its tokens and, with the same discounts, the number of its steps; their
/// quotient is the average, correct from the first step on. That is Adam's bias correction (Kingma & Ba 2015, Algorithm
/// 1), `(1 - d) Σ d^i x_i / (1 - d^n)`, as `(1 - d^n) / (1 - d) = Σ d^i`. A step without tokens does not count for that
/// layer.
///
/// Only additions, products and quotients in a fixed order: every rank with the same state and counts gets the same
/// bits.
///
/// ```
/// use evermoe::dispatch::LoadAverage;
/// let mut average = LoadAverage::new(1, 2, 1.0)?; // a step counts half of the step after it
/// average.add(&[8, 0])?;
/// assert_eq!(average.loads(), [8.0, 0.0]);
/// average.add(&[2, 6])?; // (8 / 2 + 2) / (1 / 2 + 1) and 6 / (1 / 2 + 1)
/// assert_eq!(average.loads(), [4.0, 4.0]);
/// # Ok::<(), evermoe::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LoadAverage {
    experts: usize,
    decay: f64,
    /// `[layers, experts + 1]`: discounted tokens of each expert, then discounted steps.
    state: Vec<f64>,
}

impl LoadAverage {
    /// Creates an empty average, in which a step counts half of one `half_life` steps later.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a half-life that is below 1 or not finite, and for more numbers
    /// than memory can hold.
    pub fn new(layers: usize, experts: usize, half_life: f64) -> Result<Self> {
        ensure!(
            half_life.is_finite() && half_life >= 1.0,
            "half_life: expected a finite number of steps, 1 or more, got {half_life}"
        );
        let len = experts.checked_add(1).and_then(|row| row.checked_mul(layers));
        let len = len.filter(|&len| len <= 1 << 24);
        ensure!(len.is_some(), "layers, experts: {layers} × {experts} is more than 2^24 numbers");
        Ok(Self { experts, decay: half_power(half_life), state: vec![0.0; len.unwrap_or(0)] })
    }

    /// Restores an average from its [`state`](Self::state).
    ///
    /// # Errors
    /// As [`new`](Self::new); also for a state of another size, or one that no steps lead to.
    pub fn from_state(layers: usize, experts: usize, half_life: f64, state: &[f64]) -> Result<Self> {
        let empty = Self::new(layers, experts, half_life)?;
        ensure!(
            state.len() == empty.state.len(),
            "state: expected {layers} layers × {experts} + 1 numbers, got {}",
            state.len()
        );
        for (layer, row) in state.chunks_exact(experts + 1).enumerate() {
            let (tokens, steps) = (&row[..experts], row[experts]);
            let is_number = row.iter().all(|number| number.is_finite() && *number >= 0.0);
            let is_reached = steps >= 1.0 || (steps == 0.0 && tokens.iter().all(|&tokens| tokens == 0.0));
            ensure!(is_number && is_reached, "state: no steps lead to the numbers of layer {layer}");
        }
        Ok(Self { state: state.to_vec(), ..empty })
    }

    /// Adds a step: tokens `[layers, experts]` of all ranks together.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for another size and negative counts; the average is then
    /// unchanged.
    pub fn add(&mut self, tokens: &[i64]) -> Result<()> {
        let (experts, row) = (self.experts, self.experts + 1);
        let layers = self.state.len() / row;
        ensure!(
            tokens.len() == layers * experts,
            "tokens: expected {layers} layers × {experts} experts, got {} numbers",
            tokens.len()
        );
        if let Some(cell) = tokens.iter().position(|&count| count < 0) {
            let (layer, expert) = (cell / experts, cell % experts);
            ensure!(
                false,
                "tokens: expert {expert} of layer {layer} has {}; counts start at 0",
                tokens[cell]
            );
        }
        for (state, tokens) in self.state.chunks_exact_mut(row).zip(tokens.chunks_exact(experts.max(1))) {
            if tokens.iter().any(|&count| count > 0) {
                let step = tokens.iter().map(|&count| count as f64).chain([1.0]);
                state.iter_mut().zip(step).for_each(|(sum, number)| *sum = *sum * self.decay + number);
            }
        }
        Ok(())
    }

    /// `[layers, experts]`: average tokens of each expert in a step; zeros for a layer without a step yet.
    pub fn loads(&self) -> Vec<f64> {
        let layers = self.state.chunks_exact(self.experts + 1);
        let average = |layer: &[f64]| {
            let (tokens, steps) = (&layer[..self.experts], layer[self.experts].max(1.0));
            tokens.iter().map(|tokens| tokens / steps).collect::<Vec<_>>()
        };
        layers.flat_map(average).collect()
    }

    /// State to send to other ranks or save, `[layers, experts + 1]`: discounted tokens of each expert, then discounted
    /// steps.
    pub fn state(&self) -> &[f64] {
        &self.state
    }

    /// Layers and experts.
    pub fn shape(&self) -> [usize; 2] {
        [self.state.len() / (self.experts + 1), self.experts]
    }
}

/// `2^(-1 / steps)`, steps 1 or more, with the same bits on every machine, which a C library's `pow` does not
/// guarantee: Horner's scheme for the series of `exp`, accurate to below the last bit.
fn half_power(steps: f64) -> f64 {
    let x = -std::f64::consts::LN_2 / steps;
    (1..=20).rev().fold(1.0, |sum, n| 1.0 + x / f64::from(n) * sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn half_lives_are_exact() {
        assert_eq!(half_power(1.0), 0.5);
        for steps in [1.5, 2.0, 7.0, 1e3, 1e9] {
            assert!((half_power(steps) - (-1.0 / steps).exp2()).abs() <= f64::EPSILON, "{steps}");
        }
    }

    #[test]
    fn a_step_counts_half_of_one_a_half_life_later() {
        let mut average = LoadAverage::new(1, 2, 4.0).unwrap();
        for tokens in [[1, 0], [0, 0], [0, 1], [0, 1], [0, 1], [0, 1]] {
            average.add(&tokens).unwrap();
        }
        let tokens = average.state();
        assert!((tokens[0] - 0.5).abs() < 1e-15 && (tokens[2] - tokens[0] - tokens[1]).abs() < 1e-15);
    }

    #[test]
    fn layers_without_tokens_stay_as_they_are() {
        let mut average = LoadAverage::new(2, 1, 2.0).unwrap();
        average.add(&[6, 0]).unwrap();
        assert_eq!(average.loads(), [6.0, 0.0]);
        average.add(&[0, 8]).unwrap();
        assert_eq!(average.loads(), [6.0, 8.0]);
    }

    #[test]
    fn no_layers_and_no_experts() {
        for (layers, experts) in [(0, 3), (3, 0), (0, 0)] {
            let mut average = LoadAverage::new(layers, experts, 2.0).unwrap();
            average.add(&[]).unwrap();
            assert!(average.loads().is_empty());
            assert_eq!(average.shape(), [layers, experts]);
        }
    }

    #[test]
    fn errors_name_the_argument() {
        let message = |result: Result<LoadAverage>| result.unwrap_err().to_string();
        for half_life in [0.5, -1.0, f64::NAN, f64::INFINITY] {
            assert!(message(LoadAverage::new(1, 1, half_life)).starts_with("half_life: expected a finite"));
        }
        assert!(message(LoadAverage::new(usize::MAX, 2, 1.0)).contains("more than 2^24 numbers"));
        for state in [[0.0, 0.5], [1.0, 0.0], [-1.0, 1.0], [f64::NAN, 1.0], [f64::INFINITY, 1.0]] {
            assert!(message(LoadAverage::from_state(1, 1, 2.0, &state)).contains("numbers of layer 0"));
        }
        assert!(message(LoadAverage::from_state(1, 1, 2.0, &[1.0])).contains("expected 1 layers × 1 + 1"));
        let mut average = LoadAverage::new(2, 2, 3.0).unwrap();
        average.add(&[1, 2, 3, 4]).unwrap();
        let before = average.clone();
        assert!(
            average.add(&[1, 2, 3]).unwrap_err().to_string().contains("expected 2 layers × 2 experts, got 3")
        );
        assert!(average.add(&[1, 2, -3, 4]).unwrap_err().to_string().contains("expert 0 of layer 1 has -3"));
        assert_eq!(average, before);
    }

    proptest! {
        #[test]
        fn equals_the_plain_weighted_mean(
            steps in prop::collection::vec(prop::collection::vec(0_i64..1000, 6), 1..40),
            half_life in 1.0_f64..50.0,
        ) {
            let mut average = LoadAverage::new(2, 3, half_life).unwrap();
            let mut resumed = average.clone();
            for tokens in &steps {
                average.add(tokens).unwrap();
                resumed = LoadAverage::from_state(2, 3, half_life, resumed.state()).unwrap();
                resumed.add(tokens).unwrap();
            }
            prop_assert_eq!(&resumed, &average);
            for (cell, load) in average.loads().into_iter().enumerate() {
                let layer = cell / 3 * 3;
                let seen: Vec<_> = steps.iter().filter(|step| step[layer..layer + 3].iter().sum::<i64>() > 0).collect();
                let weight = |age: usize| (-(age as f64) / half_life).exp2();
                let total: f64 = (0..seen.len()).map(weight).sum();
                let sum: f64 = seen.iter().rev().enumerate().map(|(age, step)| weight(age) * step[cell] as f64).sum();
                let expected = if total > 0.0 { sum / total } else { 0.0 };
                prop_assert!((load - expected).abs() <= 1e-9 * (1.0 + expected), "{load} {expected}");
            }
        }
    }
}
