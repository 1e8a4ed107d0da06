//! A placement and its reason.

use std::fmt;

/// Node of each replica, and the reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// `[nodes, experts]` replicas.
    pub matrix: Vec<i64>,
    /// Reason of the choice.
    pub reason: Reason,
}

/// Reason for which a placement was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Reason {
    /// The construction that won.
    pub construction: Construction,
    /// Simultaneous losses at which survival was weighed.
    pub failures: usize,
    /// Share of these losses that leave every expert a replica.
    pub survival: f64,
    /// Minimum number of distinct failure domains of an expert: any smaller number of losses is survived.
    pub spread: usize,
    /// Load of the busiest node over the mean, with an even split of each expert's tokens.
    pub imbalance: f64,
    /// Lower bound on imbalance over all placements of the same replicas, from 1 on.
    pub least_imbalance: f64,
    /// (node, expert) pairs that are new since the previous placement, if there was one.
    pub moved: Option<usize>,
}

/// Construction of a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Construction {
    /// Maximum rank overlap.
    Mro,
    /// Round robin.
    Spread,
    /// Node after node.
    Compact,
    /// Cells, with this number of them for the experts that the losses could take.
    Cells(usize),
    /// Cells, starting from the previous placement.
    Retained(usize),
    /// The previous placement with the minimum number of exchanged replicas for the new counts.
    Previous,
    /// One of the others, made safer by exchanging replicas.
    Exchanged,
}

impl fmt::Display for Construction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mro => write!(f, "maximum rank overlap"),
            Self::Spread => write!(f, "round robin"),
            Self::Compact => write!(f, "node after node"),
            Self::Cells(count) => write!(f, "fragile experts in {count} cells"),
            Self::Previous => write!(f, "as before"),
            Self::Exchanged => write!(f, "made safer by exchanges"),
            Self::Retained(count) => write!(f, "previous placement kept, fragile experts in {count} cells"),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { construction, failures, survival, spread, imbalance, least_imbalance, moved } = self;
        write!(
            f,
            "{construction}: every expert on {spread} failure domains or more, {:.1} % of {failures} simultaneous losses \
             survived, busiest node at {imbalance:.2} of the mean load",
            survival * 100.0
        )?;
        if *least_imbalance > 1.05 {
            write!(f, " ({least_imbalance:.2} is the least that these replicas allow)")?;
        }
        match moved {
            Some(moved) => write!(f, ", {moved} new replicas"),
            None => Ok(()),
        }
    }
}
