//! Survival that planners compare: exact if it was counted.

use std::cmp::Ordering;

/// Share of all choices of failed nodes that lose nothing. Within a problem, the choices are either counted for all, or
/// estimated for all that took too much work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Share {
    /// Number that survives, and number of all choices.
    Counted { survived: u128, all: u128 },
    /// From 0 to 1.
    Estimated(f64),
}

impl Share {
    /// From 0 to 1.
    pub(crate) fn probability(self) -> f64 {
        match self {
            Self::Counted { survived, all } => survived as f64 / all as f64,
            Self::Estimated(probability) => probability,
        }
    }

    /// Whether it is less than half.
    pub(crate) fn is_minor(self) -> bool {
        match self {
            Self::Counted { survived, all } => 2 * survived < all,
            Self::Estimated(probability) => probability < 0.5,
        }
    }

    /// Whether it is at most 1 ÷ `part` of all choices below the other.
    pub(crate) fn is_near(self, other: Self, part: u32) -> bool {
        match (self, other) {
            (Self::Counted { survived, all }, Self::Counted { survived: more, all: same }) if all == same => {
                u128::from(part) * more.saturating_sub(survived) <= all
            }
            _ => other.probability() - self.probability() <= 1.0 / f64::from(part),
        }
    }

    /// Compares by survival; no two probabilities are incomparable.
    pub(crate) fn compare(self, other: Self) -> Ordering {
        match (self, other) {
            (Self::Counted { survived, all }, Self::Counted { survived: more, all: same }) if all == same => {
                survived.cmp(&more)
            }
            _ => self.probability().total_cmp(&other.probability()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_is_a_half() {
        let counted = |survived| Share::Counted { survived, all: 40 };
        assert!(!counted(20).is_minor() && counted(19).is_minor());
        assert!(counted(18).is_near(counted(20), 20) && !counted(17).is_near(counted(20), 20));
        assert!(counted(20).is_near(counted(18), 20));
        assert_eq!(counted(20).compare(Share::Estimated(0.5)), Ordering::Equal);
        assert_eq!(counted(20).compare(counted(21)), Ordering::Less);
    }
}
