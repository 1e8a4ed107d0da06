//! Reproducible random numbers: for a seed, the same on every machine.

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Creates the generator of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Creates an independent generator for one part of a seed's decisions.
    pub(crate) fn of_part(seed: u64, part: u64) -> Self {
        let mut random = Self(seed);
        let first = random.next_u64();
        random.0 = first ^ part.wrapping_mul(0xd6e8_feb8_6659_fd93);
        Self(random.next_u64())
    }

    /// Returns 64 random bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from 0 to `bound − 1`; for bounds up to 2²⁰ the bias is at most 2⁻⁴⁴.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// Returns a number from 0 to 1, excluding 1.
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns an exponentially distributed number with this mean: the time to the next event of a Poisson process.
    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -(1.0 - self.uniform()).ln() * mean
    }

    /// Returns a standard normally distributed number (Box and Muller 1958).
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn distributions_have_their_means() {
        let mut random = Random::new(1);
        let mean = |draw: &mut dyn FnMut() -> f64| (0..100_000).map(|_| draw()).sum::<f64>() / 1e5;
        assert!((mean(&mut || random.exponential(3.0)) - 3.0).abs() < 0.05);
        assert!(mean(&mut || random.normal()).abs() < 0.02);
        assert!((mean(&mut || random.normal().powi(2)) - 1.0).abs() < 0.02);
        assert!((mean(&mut || random.below(5) as f64) - 2.0).abs() < 0.02);
    }

    #[test]
    fn parts_differ_and_repeat() {
        let first = |part| Random::of_part(7, part).next_u64();
        assert_eq!(first(1), first(1));
        assert_ne!(first(1), first(2));
    }
}
