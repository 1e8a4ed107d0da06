//! The decisions in a simulation: the product's own planners.

use crate::dispatch;
use crate::error::Result;
use crate::placement::{self, Placement};
use crate::recovery::{self, Holding, Plan};
use crate::selection;

/// Maximum number of (node, expert) pairs for which the best split of tokens is computed.
const MAX_BALANCED: usize = 1 << 14;

/// The planners of a simulated job. [`Product`] uses those of a session; a test may replace one.
pub trait Planners {
    /// Replicas of each expert: [`placement::allocate`], or [`placement::reallocate`] from the current ones.
    ///
    /// # Errors
    /// Those of the planner.
    fn allocate(
        &self,
        load: &[f64],
        nodes: usize,
        slots: usize,
        min_replicas: usize,
        previous: Option<&[i64]>,
    ) -> Result<Vec<i64>> {
        match previous {
            Some(previous) => placement::reallocate(load, nodes, slots, min_replicas, previous),
            None => placement::allocate(load, nodes, slots, min_replicas),
        }
    }

    /// Nodes of each replica: [`placement::place`].
    ///
    /// # Errors
    /// Those of the planner.
    fn place(&self, request: &placement::Request<'_>) -> Result<Placement> {
        placement::place(request)
    }

    /// Assignment of rows to nodes: [`placement::ranks_in_place`], from which `keep_in_place` makes a matrix.
    ///
    /// # Errors
    /// Those of the planner.
    fn ranks_in_place(
        &self,
        held: &[i64],
        placement: &[i64],
        nbytes: &[i64],
        domains: &[Vec<usize>],
    ) -> Result<Vec<usize>> {
        placement::ranks_in_place(held, placement, nbytes, domains)
    }

    /// Owner of each module that is no expert: [`selection::place_owners`].
    ///
    /// # Errors
    /// Those of the planner.
    fn place_owners(
        &self,
        nbytes: &[u64],
        active: &[Vec<usize>],
        copies: &[Vec<usize>],
        loads: &[u64],
    ) -> Result<Vec<usize>> {
        selection::place_owners(nbytes, active, copies, loads)
    }

    /// Load of the busiest node over the mean: [`dispatch::imbalance`] of tokens that are split by the policy. With
    /// many nodes, of tokens that are split evenly, which is an upper bound and much faster.
    ///
    /// # Errors
    /// Those of the planner.
    fn imbalance(&self, matrix: &[i64], load: &[f64], nodes: usize, policy: dispatch::Policy) -> Result<f64> {
        let policy = if matrix.len() <= MAX_BALANCED { policy } else { dispatch::Policy::Even };
        dispatch::imbalance(matrix, load, nodes, policy)
    }

    /// The version from which all continue: [`recovery::plan_lagging`].
    ///
    /// # Errors
    /// Those of the planner.
    fn plan_recovery(
        &self,
        bytes: &[u64],
        holdings: &[Vec<Holding>],
        needs: &[Vec<usize>],
        may_lag: &[usize],
    ) -> Result<Plan> {
        recovery::plan_lagging(bytes, holdings, needs, may_lag)
    }
}

/// The planners of a session.
#[derive(Clone, Copy, Debug, Default)]
pub struct Product;

impl Planners for Product {}
