//! Scenario of a simulation: a cluster with its costs, a model, the options of a session, and a duration.

use super::costs::Costs;
use super::failures::Source;
use super::ranges::{not_negative, positive};
use crate::ensure;
use crate::error::Result;
use crate::protection::PresetName;
use crate::protocol::STEP_BITS;
use crate::schedule::MAX_STEPS;
use serde::{Deserialize, Serialize};

/// Maximum number of nodes, including spares.
const MAX_NODES: usize = 1 << 17;
/// Maximum number of experts over all classes of layers.
const MAX_UNITS: usize = 1 << 18;
/// Maximum duration of a simulation in seconds: a century.
const MAX_SECONDS: f64 = 3.2e9;

/// A job on a cluster that fails.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The cluster.
    pub cluster: Cluster,
    /// Costs on the cluster.
    pub costs: Costs,
    /// The model that is trained.
    pub model: Model,
    /// Tokens of each expert.
    pub load: Load,
    /// Options of the session.
    pub session: SessionChoices,
    /// Sources of failures.
    pub failures: Vec<Source>,
    /// Maximum duration in seconds.
    pub seconds: f64,
    /// Number of steps of the job; none if only time ends it.
    pub steps: Option<u64>,
}

/// A cluster of equal machines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Nodes that the job trains on. The devices of a node fail together and count as one member here.
    pub nodes: usize,
    /// Nodes that are ready to replace a lost one.
    pub spares: usize,
    /// Devices of a node. Each has a process, which verifies the units that it fetches.
    pub devices: usize,
    /// Consecutive nodes that share a rack; 0 if racks do not matter.
    pub nodes_per_rack: usize,
    /// Latency of every transfer between nodes, in seconds.
    pub network_latency_seconds: f64,
    /// Network bandwidth of a node, in bytes per second.
    pub network_bytes_per_second: f64,
    /// Host memory of a node that is free for copies.
    pub host_bytes: u64,
}

/// A model with MoE layers, as a node sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// MoE layers.
    pub layers: usize,
    /// Number of classes of layers. Layers of a class have the same load, placement and copies.
    pub classes: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Bytes of an expert's state.
    pub expert_state_bytes: u64,
    /// Bytes of an expert's gradient as it is sent.
    pub expert_gradient_bytes: u64,
    /// Bytes of the state of each module that is no expert.
    pub dense_modules: Vec<u64>,
    /// Bytes of the weights of these modules.
    pub dense_weight_bytes: u64,
    /// Tokens of a step's global batch.
    pub tokens_per_step: u64,
    /// Seconds of a step on all nodes of the cluster, with a perfectly even load.
    pub step_seconds: f64,
    /// A step on fewer nodes takes `(all / nodes)^scaling` times as long. With 1 the remaining nodes do all the work;
    /// with 0 a step takes as long as before; below 0 all nodes share one machine, whose processors have less to do.
    pub scaling: f64,
    /// Share of a step in which experts compute; only this share grows with an uneven load.
    pub expert_share: f64,
    /// Share of a step in which the network is idle.
    pub network_idle: f64,
    /// Whether the optimizer's steps can be repeated bit for bit.
    pub replayable: bool,
}

/// Tokens of each expert, and their drift.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// Exponent of a Zipf distribution at the start; 0 is even.
    pub zipf: f64,
    /// Standard deviation of the change of the logarithm of each expert's share.
    pub drift: f64,
    /// Steps between two changes.
    pub drift_interval: u64,
    /// `[(step, classes × experts)]`: recorded tokens from a step on, which replace the distribution; empty for none.
    pub trace: Vec<(u64, Vec<f64>)>,
}

/// Options of a session, under the session's own names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionChoices {
    /// Replicas of experts that each node holds per layer; none for the session's own choice.
    pub slots: Option<usize>,
    /// Replicas that a node has memory for; a job that needs more waits for nodes. None for no limit.
    pub most_slots: Option<usize>,
    /// Minimum number of active replicas of each expert; none for the preset's.
    pub min_replicas: Option<usize>,
    /// Location of the optimizer state of modules that are no experts.
    pub dense: Dense,
    /// Number of nodes that should hold each unit.
    pub copies: usize,
    /// Share of a step by which copies may delay it.
    pub copy_budget: f64,
    /// Steps over which a version is copied (`gemini`, `baft`); none for as few as delay no step.
    pub snapshot_interval: Option<usize>,
    /// Experts of each layer in a snapshot in own memory, for the forecast of `pec`; none for half.
    #[serde(default)]
    pub experts_per_snapshot: Option<usize>,
    /// Steps between two searches for newcomers; 0 for none.
    pub join_interval: u64,
    /// Steps between two decisions whether experts should move; 0 for none.
    pub rebalance_interval: u64,
    /// Seconds to wait for the holders of missing units.
    pub rejoin_timeout: f64,
    /// Steps between checkpoints in the store; 0 for none.
    pub checkpoint_interval: u64,
    /// Bytes of gradients that a node logs for others.
    pub replay_log_bytes: u64,
    /// Experts of each layer that `pec` saves at a time; none for a quarter.
    pub experts_per_save: Option<usize>,
    /// Steps between the saves of `pec`.
    pub save_interval: u64,
    /// Portion of tokens that `pec` may lose before it saves more.
    pub max_lost_token_fraction: f64,
    /// Bytes that `moetion` may send to peers in a step; none for bandwidth × time of a step.
    pub remote_bytes_per_step: Option<u64>,
    /// Whether all experts and copies are planned again at every change, as in a session. If not, a newcomer takes the
    /// units of a lost node, and all are planned again only if an expert would have no node.
    pub replans: bool,
}

/// Location of the optimizer state of modules that are no experts; their weights are on every device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dense {
    /// On every device.
    Replicated,
    /// On the owner of each module: one node that trains it.
    Sharded,
}

/// A fault-tolerance scheme.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Scheme {
    /// A preset.
    Preset {
        /// Its name.
        name: PresetName,
    },
    /// The usual practice: checkpoints from which all restart.
    Restart(RestartChoices),
}

impl Scheme {
    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Self::Preset { name } => name.name(),
            Self::Restart(restart) => &restart.name,
        }
    }
}

/// Checkpoints from which all restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestartChoices {
    /// Its name.
    pub name: String,
    /// Number of nodes that share the experts of all layers; only a multiple of it trains.
    pub expert_parallel: usize,
    /// Whether groups without a lost node continue without a restart while the others are dropped.
    pub drops_groups: bool,
    /// Steps between checkpoints.
    pub checkpoint_interval: u64,
    /// Seconds for which arriving nodes are collected before they join.
    pub join_seconds: f64,
}

/// Steps of a job without an end: the maximum that a version can count.
const NO_END: u64 = (1 << STEP_BITS) - 1;

impl Scenario {
    /// Number of steps of the job.
    pub(super) fn until(&self) -> u64 {
        self.steps.unwrap_or(NO_END)
    }

    /// Refuses an invalid scenario.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) with the field, the value expected and the value that came.
    pub fn check(&self) -> Result<()> {
        let Cluster { nodes, spares, .. } = self.cluster;
        ensure!(nodes >= 1, "cluster.nodes: expected 1 or more, got 0");
        ensure!(self.cluster.devices >= 1, "cluster.devices: expected 1 or more, got 0");
        ensure!(
            nodes.saturating_add(spares) <= MAX_NODES,
            "cluster.nodes: expected at most {MAX_NODES} with spares, got {nodes} + {spares}"
        );
        positive("seconds", self.seconds)?;
        let steps = self.until();
        ensure!((1..=NO_END).contains(&steps), "steps: expected 1 to {NO_END}, got {steps}");
        ensure!(
            (0.0..=MAX_SECONDS).contains(&self.seconds),
            "seconds: expected at most {MAX_SECONDS:e}, got {}",
            self.seconds
        );
        self.check_model()?;
        self.costs.check()?;
        not_negative("cluster.network_latency_seconds", self.cluster.network_latency_seconds)?;
        positive("cluster.network_bytes_per_second", self.cluster.network_bytes_per_second)?;
        self.check_session()?;
        self.check_load()?;
        for source in &self.failures {
            source.check(nodes + spares)?;
        }
        Ok(())
    }

    fn check_model(&self) -> Result<()> {
        let model = &self.model;
        ensure!(
            model.experts >= 1 && (1..=model.layers).contains(&model.classes),
            "model: expected 1 expert or more and 1 to `layers` classes, got {} experts, {} layers, {} classes",
            model.experts,
            model.layers,
            model.classes
        );
        ensure!(
            model.experts.saturating_mul(model.classes) <= MAX_UNITS,
            "model.classes: expected at most 2^18 experts in all classes, got {} × {}",
            model.classes,
            model.experts
        );
        ensure!(
            model.dense_modules.len() <= MAX_UNITS,
            "model.dense_modules: expected at most 2^18, got {}",
            model.dense_modules.len()
        );
        positive("model.step_seconds", model.step_seconds)?;
        ensure!(
            (-1.0..=1.0).contains(&model.scaling),
            "model.scaling: expected -1 to 1, got {}",
            model.scaling
        );
        share("model.expert_share", model.expert_share)?;
        share("model.network_idle", model.network_idle)?;
        let tokens = model.tokens_per_step;
        ensure!((1..=1 << 40).contains(&tokens), "model.tokens_per_step: expected 1 to 2^40, got {tokens}");
        let bytes = u128::from(model.expert_state_bytes) * model.experts as u128 * model.layers as u128;
        let dense = model.dense_modules.iter().map(|&bytes| u128::from(bytes)).sum::<u128>();
        let all = bytes + dense;
        ensure!(all < 1 << 60, "model: expected less than 2^60 bytes of state, got {all}");
        ensure!(
            u128::from(model.dense_weight_bytes) <= dense,
            "model.dense_weight_bytes: expected at most the {dense} of the modules' state, got {}",
            model.dense_weight_bytes
        );
        Ok(())
    }

    fn check_session(&self) -> Result<()> {
        let session = &self.session;
        not_negative("session.rejoin_timeout", session.rejoin_timeout)?;
        share("session.copy_budget", session.copy_budget)?;
        share("session.max_lost_token_fraction", session.max_lost_token_fraction)?;
        for (name, count) in [
            ("slots", session.slots),
            ("most_slots", session.most_slots),
            ("min_replicas", session.min_replicas),
            ("experts_per_snapshot", session.experts_per_snapshot),
            ("experts_per_save", session.experts_per_save),
        ] {
            ensure!(count != Some(0), "session.{name}: expected 1 or more, got 0");
        }
        if let Some(steps) = session.snapshot_interval {
            ensure!(
                (1..=MAX_STEPS).contains(&steps),
                "session.snapshot_interval: expected 1 to {MAX_STEPS}, got {steps}"
            );
        }
        ensure!(session.save_interval > 0, "session.save_interval: expected 1 step or more, got 0");
        if let (Some(most), Some(slots)) = (session.most_slots, session.slots) {
            ensure!(slots <= most, "session.slots: expected at most most_slots, {most}, got {slots}");
        }
        let (nodes, experts) = (self.cluster.nodes, self.model.experts);
        if let Some(most) = session.most_slots {
            ensure!(
                most.saturating_mul(nodes) >= experts,
                "session.most_slots: {experts} experts do not fit in {nodes} nodes × {most} slots"
            );
        }
        Ok(())
    }

    fn check_load(&self) -> Result<()> {
        let load = &self.load;
        not_negative("load.zipf", load.zipf)?;
        not_negative("load.drift", load.drift)?;
        ensure!(load.drift_interval > 0, "load.drift_interval: expected 1 step or more, got 0");
        let units = self.model.experts * self.model.classes;
        let mut last = None;
        for (step, tokens) in &load.trace {
            ensure!(last < Some(*step), "load.trace: expected ascending steps, got {step} after {last:?}");
            last = Some(*step);
            ensure!(
                tokens.len() == units,
                "load.trace: expected {units} numbers at step {step}, one for each expert of each class, got {}",
                tokens.len()
            );
            for &tokens in tokens {
                not_negative("load.trace", tokens)?;
            }
        }
        Ok(())
    }
}

impl Scheme {
    /// Refuses an invalid scheme.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) with the field, the value expected and the value that came.
    pub fn check(&self, scenario: &Scenario) -> Result<()> {
        match self {
            Self::Preset { name } => {
                let never = name.preset().needs_checkpoint_dir && scenario.session.copies == 0;
                ensure!(
                    !never,
                    "session.copies: {} saves nothing with copies=0; expected 1 or more",
                    name.name()
                );
                Ok(())
            }
            Self::Restart(restart) => {
                let group = restart.expert_parallel;
                ensure!(
                    (1..=scenario.cluster.nodes).contains(&group),
                    "expert_parallel: expected 1 to {} nodes, got {group}",
                    scenario.cluster.nodes
                );
                ensure!(
                    restart.checkpoint_interval > 0,
                    "checkpoint_interval: expected 1 step or more, got 0"
                );
                not_negative("join_seconds", restart.join_seconds)
            }
        }
    }
}

fn share(name: &str, value: f64) -> Result<()> {
    ensure!((0.0..=1.0).contains(&value), "{name}: expected a share, 0 to 1, got {value}");
    Ok(())
}
