//! Ledger of tokens at risk and tokens lost, and the resulting K: PEC's portion of lost tokens (PLT) and Dynamic-K.

use super::tokens::check_size;
use crate::ensure;
use crate::error::Result;
use serde::{Deserialize, Serialize};

/// Version of the JSON's layout.
pub(super) const VERSION: u32 = 1;

/// Counts of the tokens of every expert since its last copy.
///
/// A step adds its counts, a checkpoint names the experts it copied, a recovery names the experts that returned to
/// their last copy:
///
/// ```text
/// add       seen += counts, at_risk += counts
/// copied    at_risk = 0 for the chosen; the others that have tokens at risk wait for one checkpoint more
/// lose      lost += at_risk, at_risk = 0 for those that fell back
/// restore   all counts are those of the state that a recovery restored
/// ```
///
/// All counts are `[layers, experts]`. PLT is computed per layer as tokens lost ÷ tokens seen, and averaged over
/// layers; it is 0 for a layer that has seen none.
///
/// **Dynamic-K**: a run may lose `max_lost_token_fraction` of its tokens, and each part of it the same portion of its
/// own. Whenever a recovery that lost tokens leaves the run's PLT above the limit for the part so far, K doubles, up to
/// all experts.
///
/// ```
/// use evermoe::selection::TokenLedger;
/// let mut ledger = TokenLedger::new(1, 4, 1, 0.05)?;
/// ledger.add(&[60, 30, 10, 0])?;
/// ledger.copied(&[vec![0]])?;
/// assert_eq!(ledger.at_risk(), [0, 30, 10, 0]);
/// assert_eq!(ledger.lose(&[vec![2, 3]], None)?, 0.1); // 10 of 100 tokens, more than 0.05
/// assert_eq!(ledger.experts_per_layer(), 2);
/// # Ok::<(), evermoe::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenLedger {
    #[serde(rename = "evermoe_token_ledger")]
    pub(super) version: u32,
    pub(super) layers: usize,
    pub(super) experts: usize,
    pub(super) experts_per_layer: usize,
    pub(super) max_lost_token_fraction: f64,
    step: u64,
    checkpoint: u64,
    pub(super) seen: Vec<i64>,
    pub(super) at_risk: Vec<i64>,
    pub(super) lost: Vec<i64>,
    pub(super) waiting: Vec<i64>,
}

impl TokenLedger {
    /// Creates an empty ledger. K starts at `experts_per_layer`; with a `max_lost_token_fraction` of 1 it stays
    /// constant.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if a number is 0, layers × experts is more than 2^24, or the
    /// limit is not between 0 and 1.
    pub fn new(
        layers: usize,
        experts: usize,
        experts_per_layer: usize,
        max_lost_token_fraction: f64,
    ) -> Result<Self> {
        check_size(layers, experts)?;
        ensure!(experts_per_layer > 0, "experts_per_layer: expected 1 or more, got 0; K would stay at 0");
        ensure!(
            (0.0..=1.0).contains(&max_lost_token_fraction),
            "max_lost_token_fraction: expected a portion of the tokens from 0 to 1, got {max_lost_token_fraction}"
        );
        let zeros = vec![0; layers * experts];
        Ok(Self {
            version: VERSION,
            layers,
            experts,
            experts_per_layer: experts_per_layer.min(experts),
            max_lost_token_fraction,
            step: 0,
            checkpoint: 0,
            seen: zeros.clone(),
            at_risk: zeros.clone(),
            lost: zeros.clone(),
            waiting: zeros,
        })
    }

    /// Returns the number of layers and of experts per layer.
    pub fn shape(&self) -> [usize; 2] {
        [self.layers, self.experts]
    }

    /// Returns the number of steps so far.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the number of checkpoints so far, which the policies take.
    pub fn checkpoint(&self) -> u64 {
        self.checkpoint
    }

    /// Returns the current K of Dynamic-K.
    pub fn experts_per_layer(&self) -> usize {
        self.experts_per_layer
    }

    /// `[layers, experts]`: tokens since the start.
    pub fn seen(&self) -> &[i64] {
        &self.seen
    }

    /// `[layers, experts]`: tokens since the last copy.
    pub fn at_risk(&self) -> &[i64] {
        &self.at_risk
    }

    /// `[layers, experts]`: tokens lost in recoveries.
    pub fn lost(&self) -> &[i64] {
        &self.lost
    }

    /// `[layers, experts]`: checkpoints that passed an expert over while it had tokens at risk.
    pub fn waiting(&self) -> &[i64] {
        &self.waiting
    }

    /// Returns for each layer the PLT of a failure now that returns all experts to their last copies.
    pub fn plt_at_risk(&self) -> Vec<f64> {
        self.portions(&self.at_risk)
    }

    /// Returns for each layer the PLT of the run so far: all tokens lost ÷ all tokens seen.
    pub fn plt_lost(&self) -> Vec<f64> {
        self.portions(&self.lost)
    }

    /// Returns the PLT of the run so far: [`plt_lost`](Self::plt_lost) averaged over layers.
    pub fn plt(&self) -> f64 {
        mean(&self.plt_lost())
    }

    /// Adds the tokens of a step, `[layers, experts]`, over all ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for wrong sizes, negative counts and sums beyond 2^63; the
    /// ledger is then unchanged.
    pub fn add(&mut self, counts: &[i64]) -> Result<()> {
        ensure!(
            counts.len() == self.seen.len(),
            "counts: expected {} layers × {} experts, got {} numbers",
            self.layers,
            self.experts,
            counts.len()
        );
        for (cell, (&count, &seen)) in counts.iter().zip(&self.seen).enumerate() {
            let [layer, expert] = [cell / self.experts, cell % self.experts];
            ensure!(
                count >= 0,
                "counts: layer {layer} expert {expert} has {count} tokens; counts start at 0"
            );
            ensure!(
                seen.checked_add(count).is_some(),
                "counts: layer {layer} expert {expert} has {count} tokens after {seen}; the sum passes 2^63"
            );
        }
        for (cell, &count) in counts.iter().enumerate() {
            self.seen[cell] += count;
            self.at_risk[cell] += count;
        }
        self.step = self.step.saturating_add(1);
        Ok(())
    }

    /// Records a checkpoint that copied the current state of these experts; every checkpoint is recorded, even an empty
    /// one.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) unless there is one list per layer, of existing experts.
    pub fn copied(&mut self, selection: &[Vec<usize>]) -> Result<()> {
        self.copied_without(selection, &vec![0; self.at_risk.len()])
    }

    /// Records a checkpoint whose copies lack the newest tokens of their experts: `newer`, `[layers, experts]`, stay at
    /// risk.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for wrong sizes, experts that do not exist, and more newer
    /// tokens of a chosen expert than are at risk; the ledger is then unchanged.
    pub fn copied_without(&mut self, selection: &[Vec<usize>], newer: &[i64]) -> Result<()> {
        let chosen = self.cells("selection", selection)?;
        ensure!(
            newer.len() == self.at_risk.len(),
            "newer: expected {} layers × {} experts, got {} numbers",
            self.layers,
            self.experts,
            newer.len()
        );
        for &cell in &chosen {
            let ([layer, expert], most) = ([cell / self.experts, cell % self.experts], self.at_risk[cell]);
            ensure!(
                (0..=most).contains(&newer[cell]),
                "newer: layer {layer} expert {expert} has {}; expected 0 to {most}, which are at risk",
                newer[cell]
            );
        }
        for (waiting, &tokens) in self.waiting.iter_mut().zip(&self.at_risk) {
            *waiting = waiting.saturating_add(i64::from(tokens > 0));
        }
        for cell in chosen {
            self.at_risk[cell] = newer[cell];
            self.waiting[cell] = 0;
        }
        self.checkpoint = self.checkpoint.saturating_add(1);
        Ok(())
    }

    /// Replaces the counts by those of a restored state: tokens seen, lost and at risk, `[layers, experts]` each.
    ///
    /// K becomes `experts_per_layer` if that is more. An expert with more tokens at risk than before has been passed
    /// over once more, as its latest copies are lost.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for wrong sizes, negative counts, and more tokens at risk and lost
    /// than were seen; the ledger is then unchanged.
    pub fn restore(&mut self, [seen, lost, at_risk]: [&[i64]; 3], experts_per_layer: usize) -> Result<()> {
        let mut restored =
            Self { seen: seen.to_vec(), lost: lost.to_vec(), at_risk: at_risk.to_vec(), ..self.clone() };
        for (waiting, (&before, &now)) in restored.waiting.iter_mut().zip(self.at_risk.iter().zip(at_risk)) {
            *waiting = if now == 0 { 0 } else { waiting.saturating_add(i64::from(now > before)) };
        }
        restored.check_counts("counts")?;
        restored.experts_per_layer = experts_per_layer.clamp(self.experts_per_layer, self.experts);
        *self = restored;
        Ok(())
    }

    /// Records a recovery in which these experts returned to older copies, and returns its PLT.
    ///
    /// `tokens` is `[layers, experts]`: the loss of each of them, if a copy of another kind than this ledger's was
    /// used; without it, all tokens at risk. None of them is at risk afterwards.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) unless there is one list per layer, of existing experts, or if
    /// more tokens are lost than were seen; the ledger is then unchanged.
    pub fn lose(&mut self, experts: &[Vec<usize>], tokens: Option<&[i64]>) -> Result<f64> {
        let cells = self.cells("experts", experts)?;
        let tokens = tokens.unwrap_or(&self.at_risk);
        ensure!(
            tokens.len() == self.lost.len(),
            "tokens: expected {} layers × {} experts, got {} numbers",
            self.layers,
            self.experts,
            tokens.len()
        );
        let mut lost_now = vec![0; self.lost.len()];
        for &cell in &cells {
            let most = self.seen[cell] - self.lost[cell];
            ensure!(
                (0..=most).contains(&tokens[cell]),
                "tokens: layer {} expert {} has {}; expected 0 to {most}, which are not lost yet",
                cell / self.experts,
                cell % self.experts,
                tokens[cell]
            );
            lost_now[cell] = tokens[cell];
        }
        for (lost, &now) in self.lost.iter_mut().zip(&lost_now) {
            *lost += now;
        }
        for cell in cells {
            self.at_risk[cell] = 0;
            self.waiting[cell] = 0;
        }
        let plt = mean(&self.portions(&lost_now));
        if plt > 0.0 {
            self.adapt_k();
        }
        Ok(plt)
    }

    /// Doubles K if the PLT of the run is above the limit (Dynamic-K); for recoveries that lost tokens.
    pub fn adapt_k(&mut self) {
        if self.plt() > self.max_lost_token_fraction {
            self.experts_per_layer = self.experts_per_layer.saturating_mul(2).min(self.experts);
        }
    }

    /// Indices into the counts of the listed experts.
    fn cells(&self, argument: &str, lists: &[Vec<usize>]) -> Result<Vec<usize>> {
        ensure!(
            lists.len() == self.layers,
            "{argument}: expected one list of experts for each of {} layers, got {} lists",
            self.layers,
            lists.len()
        );
        let mut cells = Vec::new();
        for (layer, list) in lists.iter().enumerate() {
            for &expert in list {
                ensure!(
                    expert < self.experts,
                    "{argument}: layer {layer} names expert {expert}; there are {}",
                    self.experts
                );
                cells.push(layer * self.experts + expert);
            }
        }
        Ok(cells)
    }

    /// Returns for each layer its tokens in `part`, `[layers, experts]`, ÷ all tokens seen.
    pub fn portions(&self, part: &[i64]) -> Vec<f64> {
        let rows = part.chunks(self.experts).zip(self.seen.chunks(self.experts));
        rows.map(|(part, seen)| sum(part) / sum(seen).max(1.0)).collect()
    }
}

fn sum(counts: &[i64]) -> f64 {
    counts.iter().map(|&count| i128::from(count)).sum::<i128>() as f64
}

fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> TokenLedger {
        let mut ledger = TokenLedger::new(2, 2, 1, 0.1).unwrap();
        ledger.add(&[6, 2, 0, 0]).unwrap();
        ledger.copied(&[vec![0], vec![]]).unwrap();
        ledger.add(&[2, 0, 0, 10]).unwrap();
        ledger
    }

    #[test]
    fn plt_is_counted_per_layer_and_averaged() {
        let mut ledger = ledger();
        assert_eq!(ledger.at_risk(), [2, 2, 0, 10]);
        assert_eq!(ledger.plt_at_risk(), [0.4, 1.0]);
        assert_eq!(ledger.lose(&[vec![1], vec![0]], None).unwrap(), 0.1);
        assert_eq!((ledger.plt_lost(), ledger.plt()), (vec![0.2, 0.0], 0.1));
        assert_eq!(ledger.experts_per_layer(), 1, "at the limit, not above it");
        assert_eq!(ledger.lose(&[vec![0], vec![]], None).unwrap(), 0.1);
        assert_eq!((ledger.plt(), ledger.experts_per_layer()), (0.2, 2));
        assert_eq!(ledger.lose(&[vec![0], vec![]], None).unwrap(), 0.0, "the same tokens are not lost twice");
    }

    #[test]
    fn what_another_copy_has_is_not_lost() {
        let mut ledger = ledger();
        assert_eq!(ledger.lose(&[vec![1], vec![1]], Some(&[9, 1, 9, 6])).unwrap(), 0.35);
        assert_eq!((ledger.lost(), ledger.at_risk()), (&[0, 1, 0, 6][..], &[2, 0, 0, 0][..]));
        let before = ledger.clone();
        for (tokens, message) in
            [(&[9, 9, 9, 1][..], "expert 1 has 9; expected 0 to 1,"), (&[1], "got 1 numbers")]
        {
            let refused = ledger.lose(&[vec![1], vec![0]], Some(tokens)).unwrap_err().to_string();
            assert!(refused.contains(message), "{refused}");
        }
        assert_eq!(ledger, before);
    }

    #[test]
    fn k_is_never_more_than_all_experts() {
        assert_eq!(TokenLedger::new(1, 4, 9, 1.0).unwrap().experts_per_layer(), 4);
    }

    #[test]
    fn k_doubles_only_when_tokens_were_lost_and_stops_at_all_experts() {
        let mut ledger = TokenLedger::new(1, 5, 1, 0.0).unwrap();
        let mut after = |lists: &[Vec<usize>]| {
            ledger.add(&[1; 5]).unwrap();
            ledger.lose(lists, None).unwrap();
            ledger.experts_per_layer()
        };
        let seen = [[vec![0]], [vec![]], [vec![0]], [vec![3]], [vec![3]]].map(|lists| after(&lists));
        assert_eq!(seen, [2, 2, 4, 5, 5]);
    }

    #[test]
    fn copies_without_the_newest_tokens_leave_them_at_risk_and_have_not_passed_anyone_over() {
        let mut ledger = ledger();
        ledger.copied_without(&[vec![0, 1], vec![]], &[2, 0, 99, 99]).unwrap();
        assert_eq!((ledger.at_risk(), ledger.waiting()), (&[2, 0, 0, 10][..], &[0, 0, 0, 1][..]));
        assert_eq!(ledger.checkpoint(), 2);
        let before = ledger.clone();
        for (newer, message) in
            [([0, 1, 0, 0], "expert 1 has 1; expected 0 to 0,"), ([-1, 0, 0, 0], "has -1")]
        {
            let refused = ledger.copied_without(&[vec![0, 1], vec![]], &newer).unwrap_err().to_string();
            assert!(refused.contains(message), "{refused}");
        }
        assert!(
            ledger.copied_without(&[vec![], vec![]], &[0]).unwrap_err().to_string().contains("got 1 numbers")
        );
        assert_eq!(ledger, before);
    }

    #[test]
    fn a_restored_ledger_continues_from_the_counts_of_the_state() {
        let mut ledger = ledger();
        ledger.copied(&[vec![0], vec![1]]).unwrap();
        assert_eq!((ledger.at_risk(), ledger.waiting()), (&[0, 2, 0, 0][..], &[0, 2, 0, 0][..]));
        let [seen, lost, at_risk] = [[8, 2, 5, 10], [1, 0, 0, 0], [2, 2, 5, 0]];
        ledger.restore([&seen, &lost, &at_risk], 9).unwrap();
        assert_eq!((ledger.seen(), ledger.lost()), (&seen[..], &lost[..]));
        assert_eq!((ledger.at_risk(), ledger.waiting()), (&at_risk[..], &[1, 2, 1, 0][..]));
        assert_eq!((ledger.experts_per_layer(), ledger.portions(&at_risk)), (2, vec![0.4, 1.0 / 3.0]));
        let before = ledger.clone();
        for (at_risk, message) in [
            (&[8, 0, 0, 0][..], "counts: layer 0 expert 0 has seen 8"),
            (&[0, 0, 0, -1], "at_risk has a negative"),
            (&[0], "at_risk has 1 numbers"),
        ] {
            let refused = ledger.restore([&seen, &lost, at_risk], 1).unwrap_err().to_string();
            assert!(refused.contains(message), "{refused}");
        }
        assert_eq!(ledger, before);
        ledger.adapt_k();
        assert_eq!(ledger.experts_per_layer(), 2, "never more than all experts");
    }

    #[test]
    fn a_refused_step_changes_nothing() {
        let mut ledger = ledger();
        let before = ledger.clone();
        assert!(ledger.add(&[1, 1, 1, i64::MAX]).unwrap_err().to_string().contains("layer 1 expert 1"));
        assert!(ledger.add(&[1, 1, 1, -1]).unwrap_err().to_string().contains("has -1 tokens"));
        assert!(ledger.add(&[1]).unwrap_err().to_string().contains("counts: expected 2 layers"));
        assert!(ledger.copied(&[vec![0]]).unwrap_err().to_string().contains("got 1 lists"));
        assert!(
            ledger.copied(&[vec![0], vec![2]]).unwrap_err().to_string().contains("layer 1 names expert 2")
        );
        assert!(
            ledger.lose(&[vec![], vec![7]], None).unwrap_err().to_string().starts_with("experts: layer 1")
        );
        assert_eq!(ledger, before);
    }
}
