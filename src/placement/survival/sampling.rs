//! Monte Carlo: draws failed nodes until a holder set is complete.

use super::family::Family;

/// ln(2 / 0.001): Hoeffding's inequality at 99.9 %.
const CONFIDENCE: f64 = 7.600_902_459_542_082;

/// The part of `samples` draws of `failures` nodes that complete no set of the family.
pub(super) fn sample(family: &Family<'_>, failures: usize, samples: u64, seed: u64) -> f64 {
    let sets_of = family.sets_of_nodes();
    let mut left: Vec<usize> = family.sets.iter().map(|set| set.len()).collect();
    // Each draw shuffles the front of what the last one left: again all subsets are equally likely.
    let mut nodes: Vec<usize> = (0..family.vital.len()).collect();
    let mut random = SplitMix(seed);
    let survived = (0..samples).filter(|_| {
        let mut drawn = 0;
        let mut lost = false;
        while drawn < failures && !lost {
            let pick = drawn + random.below(nodes.len() - drawn);
            nodes.swap(drawn, pick);
            let node = nodes[drawn];
            lost = family.vital[node];
            for &set in &sets_of[node] {
                left[set] -= 1;
                lost |= left[set] == 0;
            }
            drawn += 1;
        }
        nodes[..drawn].iter().flat_map(|&node| &sets_of[node]).for_each(|&set| left[set] += 1);
        !lost
    });
    survived.count() as f64 / samples as f64
}

/// Error of the part of so many samples, at most, with a probability of 99.9 %.
pub(super) fn error(samples: u64) -> f64 {
    (CONFIDENCE / (2.0 * samples as f64)).sqrt()
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// 0 to `bound − 1`; of 2²⁰ nodes none is preferred by more than 2⁻⁴⁴.
    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}
