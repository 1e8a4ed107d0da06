//! Inputs of a choice of copies.

use crate::ensure;
use crate::error::Result;
use crate::schedule::Link;
use std::collections::BTreeMap;

/// A unit that must not be lost.
#[derive(Clone, Debug, PartialEq)]
pub struct CopyUnit {
    /// Bytes of parameters, master weights and moments.
    pub state_bytes: u64,
    /// Bytes of the reduced gradient, as it is sent after each step; 0 if it is idle.
    pub gradient_bytes: u64,
    /// Nodes that train on it.
    pub active: Vec<usize>,
    /// Tokens that it receives in a step: the loss per lost step.
    pub tokens: f64,
    /// Whether its optimizer's steps can be repeated bit for bit.
    pub replayable: bool,
}

/// A node that may keep copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyNode {
    /// Probability that it fails during a step: the step's seconds ÷ mean time between its failures.
    pub failure: f64,
    /// Nodes with the same number fail together, as soon as one of them fails.
    pub domain: usize,
    /// Host memory that is free for copies.
    pub host_bytes: u64,
    /// Device memory that is free for copies.
    pub device_bytes: u64,
    /// Idle seconds of its network in a step.
    pub network_seconds: f64,
    /// Idle seconds of its host link in a step.
    pub host_link_seconds: f64,
}

/// Request to [`choose_copies`](super::choose_copies).
#[derive(Clone, Copy, Debug)]
pub struct CopyRequest<'a> {
    /// All units.
    pub units: &'a [CopyUnit],
    /// All nodes.
    pub nodes: &'a [CopyNode],
    /// Link between nodes.
    pub network: Link,
    /// Link between a node's device and its host memory.
    pub host_link: Link,
    /// Seconds of a step.
    pub step_seconds: f64,
    /// Number of domains that should hold each unit without a lost step, so that every loss of fewer is survived.
    pub copies: usize,
    /// Share of a step by which copying may delay it, beyond the idle seconds.
    pub budget: f64,
    /// Maximum number of steps between two snapshots of a unit.
    pub max_period: usize,
    /// Steps between two persisted versions: the loss if no copy survives.
    pub persist_period: usize,
    /// Gradients that a replayed copy keeps before it applies them.
    pub log_steps: u64,
}

impl CopyRequest<'_> {
    pub(super) fn check(&self) -> Result<()> {
        self.network.check("network")?;
        self.host_link.check("host_link")?;
        let Self { step_seconds, copies, budget, max_period, persist_period, .. } = *self;
        ensure!(
            step_seconds.is_finite() && step_seconds > 0.0,
            "step_seconds: expected finite seconds, above 0, got {step_seconds}"
        );
        ensure!(copies > 0, "copies: expected 1 (the active one) or more, got 0");
        ensure!((0.0..=1.0).contains(&budget), "budget: expected a share of the step, 0 to 1, got {budget}");
        ensure!(
            (1..=1 << 12).contains(&max_period),
            "max_period: expected 1 to 4096 steps, got {max_period}"
        );
        ensure!(persist_period > 0, "persist_period: expected 1 step or more, got 0");
        ensure!(self.nodes.len() <= 1 << 20, "nodes: expected at most 2^20, got {}", self.nodes.len());
        self.check_nodes()?;
        self.check_units()
    }

    fn check_nodes(&self) -> Result<()> {
        for (number, node) in self.nodes.iter().enumerate() {
            ensure!(
                (0.0..=1.0).contains(&node.failure),
                "nodes: failure of node {number}: expected a probability, 0 to 1, got {}",
                node.failure
            );
            for (name, seconds) in [("network", node.network_seconds), ("host_link", node.host_link_seconds)]
            {
                ensure!(
                    seconds.is_finite() && seconds >= 0.0,
                    "nodes: {name}_seconds of node {number}: expected finite seconds, 0 or more, got {seconds}"
                );
            }
        }
        Ok(())
    }

    fn check_units(&self) -> Result<()> {
        let mut all = 0_u128;
        for (number, unit) in self.units.iter().enumerate() {
            ensure!(!unit.active.is_empty(), "units: unit {number} is active nowhere; nothing can be copied");
            if let Some(node) = unit.active.iter().find(|&&node| node >= self.nodes.len()) {
                ensure!(
                    false,
                    "units: unit {number} is active on node {node}; there are {} nodes",
                    self.nodes.len()
                );
            }
            ensure!(
                unit.tokens.is_finite() && unit.tokens >= 0.0,
                "units: tokens of unit {number}: expected a finite number, 0 or more, got {}",
                unit.tokens
            );
            all += self.kept_bytes(unit) + 2 * u128::from(unit.state_bytes);
        }
        let most = u64::MAX as u128 / self.copies.max(1) as u128;
        ensure!(
            all <= most,
            "units: expected fewer than 2^64 bytes in all copies together, got {all} in each"
        );
        Ok(())
    }

    fn kept_bytes(&self, unit: &CopyUnit) -> u128 {
        u128::from(unit.state_bytes) + u128::from(self.log_steps) * u128::from(unit.gradient_bytes)
    }

    /// Domains from 0 on, by node, and the probability that each fails during a step.
    pub(super) fn domains(&self) -> (Vec<usize>, Vec<f64>) {
        let mut number = BTreeMap::new();
        for node in self.nodes {
            let next = number.len();
            number.entry(node.domain).or_insert(next);
        }
        let of_node: Vec<usize> = self.nodes.iter().map(|node| number[&node.domain]).collect();
        let mut alive = vec![1.0; number.len()];
        for (node, &domain) in self.nodes.iter().zip(&of_node) {
            alive[domain] *= 1.0 - node.failure;
        }
        (of_node, alive.iter().map(|alive| 1.0 - alive).collect())
    }
}
