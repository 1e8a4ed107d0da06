//! Selection of the experts to copy next, where a preset copies a few of them at a time.

use crate::error::Result;
use crate::placement::primaries;
use crate::protection::unmeasured_budget;
use crate::selection::{Selection, TokenLedger, budget, load_aware, sequential};

/// Bytes that `moetion` may copy in a step: options of a session; none for what was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budgets {
    /// To peers.
    pub remote: Option<u64>,
    /// Into the memory of the experts' own nodes.
    pub local: Option<u64>,
}

/// Selects experts from the tokens of a [`TokenLedger`], the same on all members.
#[derive(Clone, Debug, PartialEq)]
pub struct Selector {
    is_sequential: bool,
    budgets: Budgets,
    /// For each expert, the rank that saves it if it is selected.
    ranks: Vec<i64>,
    /// Whether peers keep a copy of an expert.
    kept: Vec<bool>,
    expert_bytes: u64,
    all_bytes: u64,
}

impl Selector {
    /// A selector before any plan.
    ///
    /// `bytes` are those of each expert's state, `[layers, experts]`. `is_sequential` selects experts in their order
    /// instead of by load (PEC).
    pub fn new(bytes: &[u64], is_sequential: bool, budgets: Budgets) -> Self {
        Self {
            is_sequential,
            budgets,
            ranks: vec![-1; bytes.len()],
            kept: vec![false; bytes.len()],
            expert_bytes: bytes.iter().copied().max().unwrap_or(1).max(1),
            all_bytes: bytes.iter().sum(),
        }
    }

    /// Follows a plan.
    ///
    /// Of each expert, `active` lists the ranks that train it, and `kept` says whether peers keep a copy. An expert that no
    /// rank trains fills a row of a layer with fewer experts.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for an active rank that does not exist.
    pub fn replan(&mut self, active: &[Vec<usize>], kept: Vec<bool>, ranks: usize) -> Result<()> {
        let trained: Vec<usize> = (0..active.len()).filter(|&expert| !active[expert].is_empty()).collect();
        let holders: Vec<Vec<usize>> = trained.iter().map(|&expert| active[expert].clone()).collect();
        let savers = primaries(&holders, &vec![1; holders.len()], ranks)?;
        self.ranks = vec![-1; active.len()];
        trained.into_iter().zip(savers).for_each(|(expert, rank)| self.ranks[expert] = rank as i64);
        self.kept = kept;
        Ok(())
    }

    /// Bytes that all members together may send to peers in a step, with what the links can carry if that is measured.
    pub fn remote_budget(&self, measured: Option<u64>) -> u64 {
        self.budget(self.budgets.remote, measured)
    }

    /// Multiplies the budget, unless it has no room for an expert: then it has none in several steps either.
    pub(super) fn scale_remote_budget(&mut self, measured: Option<u64>, by: u64) {
        let budget = self.remote_budget(measured);
        let by = if budget < self.expert_bytes { 1 } else { by };
        self.budgets.remote = Some(budget.saturating_mul(by));
    }

    fn budget(&self, requested: Option<u64>, measured: Option<u64>) -> u64 {
        requested.or(measured).unwrap_or(unmeasured_budget(self.expert_bytes, self.all_bytes))
    }

    /// The experts whose copies on peers follow the step that begins (MoEtion, Algorithm 1).
    ///
    /// Of those that peers keep, they have the most tokens at risk after the step, within the budget. The step's own tokens
    /// are not known yet, so each expert counts with its average per step, and at least one.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) as of [`budget`].
    pub fn select_to_follow(
        &self,
        ledger: &TokenLedger,
        average: &[f64],
        measured: Option<u64>,
    ) -> Result<Selection> {
        let expected = average.iter().map(|tokens| (tokens.round_ties_even() as i64).max(1));
        let at_risk = ledger.at_risk().iter().zip(expected).zip(&self.kept);
        let tokens: Vec<i64> = at_risk
            .map(|((&tokens, expected), &is_kept)| if is_kept { tokens + expected } else { 0 })
            .collect();
        budget(&tokens, ledger.shape(), self.remote_budget(measured) / self.expert_bytes)
    }

    /// The experts that get snapshots in the memory of their own nodes, within the budget (`moetion`).
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) as of [`budget`].
    pub fn select_within_budget(&self, ledger: &TokenLedger, measured: Option<u64>) -> Result<Selection> {
        let bytes = self.budget(self.budgets.local, measured);
        budget(ledger.at_risk(), ledger.shape(), bytes / self.expert_bytes)
    }

    /// K experts of each layer (`pec`), with the ledger's current K: in turn, or those with the most tokens at risk, and
    /// no more of one rank than its share.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) as of [`sequential`] and [`load_aware`].
    pub fn select_in_turn(&self, ledger: &TokenLedger) -> Result<Selection> {
        let (shape, each, checkpoint) = (ledger.shape(), ledger.experts_per_layer(), ledger.checkpoint());
        if self.is_sequential {
            return sequential(shape[0], shape[1], each, checkpoint);
        }
        load_aware(ledger.at_risk(), Some(ledger.waiting()), Some(&self.ranks), shape, each, checkpoint)
    }
}
