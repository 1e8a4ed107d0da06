//! The presets: one definition for sessions, `evermoe plan` and the simulator.

use crate::dispatch;
use crate::error::{Error, Result, find_named};
use crate::placement;
use crate::recovery::Kind;
use crate::schedule;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// Name of a preset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PresetName {
    /// Snapshots of all units to a group of peers (SOSP'23).
    Gemini,
    /// Some experts of each layer to the store at a time.
    Pec,
    /// Snapshots of all units to the previous node.
    Baft,
    /// Gradients of the experts with the most tokens at risk.
    Moetion,
    /// Each expert trained on several nodes.
    Lazarus,
    /// The cheapest protection of each unit.
    Auto,
}

impl PresetName {
    /// All names, in the order of [`PRESETS`].
    pub const ALL: [Self; 6] =
        [Self::Gemini, Self::Pec, Self::Baft, Self::Moetion, Self::Lazarus, Self::Auto];

    /// The name on the command line and in Python.
    pub fn name(self) -> &'static str {
        ["gemini", "pec", "baft", "moetion", "lazarus", "auto"][self as usize]
    }

    /// The preset.
    ///
    /// ```
    /// use evermoe::protection::{Copying, PresetName};
    /// let preset = "auto".parse::<PresetName>()?.preset();
    /// assert_eq!(preset.copying, Copying::Chosen);
    /// # Ok::<(), evermoe::Error>(())
    /// ```
    pub fn preset(self) -> &'static Preset {
        &PRESETS[self as usize]
    }
}

impl FromStr for PresetName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        find_named("preset", &Self::ALL, Self::name, name)
    }
}

/// Copies that a preset keeps in addition to the active holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copying {
    /// Copies by [`choose_copies`](super::choose_copies) (`auto`).
    Chosen,
    /// Snapshots of all units to peers (`gemini`).
    Everything,
    /// Snapshots of all units to the previous nodes (`baft`).
    ToPrevious,
    /// Replayed copies of units that too few nodes train (`moetion`).
    Uncovered,
    /// None on other nodes (`lazarus`, `pec`).
    Nothing,
}

impl Copying {
    /// The name in Python.
    pub fn name(self) -> &'static str {
        ["chosen", "everything", "to_previous", "uncovered", "nothing"][self as usize]
    }
}

/// Experts that are copied in a step, of those of which [`Preset::copying`] makes copies or which the store keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selecting {
    /// All of them.
    All,
    /// A few at a time: those with the most tokens since their last copy, or those that have waited longest.
    LoadAware,
    /// As many as a budget of bytes allows: those with the most tokens at risk.
    Budget,
}

impl Selecting {
    /// The name in Python.
    pub fn name(self) -> &'static str {
        ["all", "load-aware", "budget"][self as usize]
    }
}

/// Whether a recovery may take experts at older versions than the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lagging {
    /// Never: all units go back to one version.
    Never,
    /// Where no version of all units survives, and only with copies.
    IfNeeded,
    /// Always.
    Always,
}

impl Lagging {
    /// The name in Python.
    pub fn name(self) -> &'static str {
        ["never", "if needed", "always"][self as usize]
    }
}

/// The planners that a preset uses, and what else differs between presets.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Preset {
    /// Its name.
    pub name: PresetName,
    /// Its description in one line.
    pub summary: &'static str,
    /// Copies in addition to the nodes that train a unit.
    pub copying: Copying,
    /// Experts that are copied in a step.
    pub selection: Selecting,
    /// Policy by which windows are filled; none where nothing is copied in windows.
    pub schedule: Option<schedule::Policy>,
    /// Kinds of copies that protect a unit, in addition to the node that trains it.
    pub kinds: &'static [Kind],
    /// Default policy for where experts train.
    pub placement: placement::Policy,
    /// Default policy by which the replicas of an expert share its tokens.
    pub token_split: dispatch::Policy,
    /// Whether a recovery may take experts at older versions than the rest.
    pub lagging: Lagging,
    /// Whether the copies of a step are made during the next one: they are complete at its vote, not earlier.
    pub copies_late: bool,
    /// Whether the snapshots of each expert have versions of their own.
    pub per_expert_versions: bool,
    /// Whether experts are saved a few at a time to a store that all members share, with all other units each time.
    pub needs_checkpoint_dir: bool,
    /// Whether the replication counts the nodes that train each expert.
    pub active_copies: bool,
}

impl Preset {
    /// The largest replication that the preset accepts; none for no limit.
    ///
    /// What is kept in the memory of one node alone is on no more nodes, whatever the number says.
    pub fn max_replication(&self) -> Option<usize> {
        (self.copying == Copying::Nothing && !self.active_copies).then_some(2)
    }

    /// Active replicas of each expert that a session wants; `min_replicas` overrides the preset.
    pub fn replicas(&self, replication: usize, min_replicas: Option<usize>) -> usize {
        min_replicas.unwrap_or(if self.active_copies { replication.max(1) } else { 1 })
    }

    /// Whether a unit that a single node trains survives the loss of that node: as a copy of every step, or in the store.
    ///
    /// From the store all members go back to the newest step of which all units other than experts are saved.
    pub fn protects_owners(&self) -> bool {
        self.needs_checkpoint_dir || self.copying != Copying::Nothing
    }
}

/// What most presets have in common.
const BASE: Preset = Preset {
    name: PresetName::Auto,
    summary: "",
    copying: Copying::Nothing,
    selection: Selecting::All,
    schedule: None,
    kinds: &[],
    placement: placement::Policy::Balanced,
    token_split: dispatch::Policy::Balanced,
    lagging: Lagging::Never,
    copies_late: false,
    per_expert_versions: false,
    needs_checkpoint_dir: false,
    active_copies: false,
};

/// All presets, in the order of [`PresetName`].
pub const PRESETS: [Preset; 6] = [
    Preset {
        name: PresetName::Gemini,
        summary: "all units to the host memory of a group of peers after each step, in chunks in idle network time (SOSP'23)",
        copying: Copying::Everything,
        schedule: Some(schedule::Policy::Gemini),
        kinds: &[Kind::Snapshot, Kind::Persisted],
        copies_late: true,
        ..BASE
    },
    Preset {
        name: PresetName::Pec,
        summary: "some experts of each layer, and all other units, to own memory, fewer to the store; some tokens are lost",
        selection: Selecting::LoadAware,
        kinds: &[Kind::Snapshot, Kind::Persisted],
        lagging: Lagging::Always,
        per_expert_versions: true,
        needs_checkpoint_dir: true,
        ..BASE
    },
    Preset {
        name: PresetName::Baft,
        summary: "complete units to the previous node in the pipeline, packed into bubbles that both ends have",
        copying: Copying::ToPrevious,
        schedule: Some(schedule::Policy::Baft),
        kinds: &[Kind::Snapshot],
        copies_late: true,
        ..BASE
    },
    Preset {
        name: PresetName::Moetion,
        summary: "the experts with the most tokens at risk, their optimizer replayed from gradients, split by bubbles",
        copying: Copying::Uncovered,
        selection: Selecting::Budget,
        schedule: Some(schedule::Policy::Moetion),
        kinds: &[Kind::Replayed, Kind::Snapshot],
        lagging: Lagging::Always,
        per_expert_versions: true,
        ..BASE
    },
    Preset {
        name: PresetName::Lazarus,
        summary: "experts train on several nodes by load, placed so that most losses leave one; other copies in the store alone",
        kinds: &[Kind::Active, Kind::Persisted],
        placement: placement::Policy::Safest,
        token_split: dispatch::Policy::Even,
        active_copies: true,
        ..BASE
    },
    Preset {
        name: PresetName::Auto,
        summary: "one cost model picks the cheapest way for each unit; no step is lost where windows and memory allow",
        copying: Copying::Chosen,
        schedule: Some(schedule::Policy::Auto),
        kinds: &[Kind::Active, Kind::Replayed, Kind::Snapshot, Kind::Persisted],
        lagging: Lagging::IfNeeded,
        ..BASE
    },
];

/// Experts of each layer that `pec` copies at a time to its two levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    /// Into the memory of their own nodes.
    pub snapshot: usize,
    /// To the store that all members share; at most `snapshot`.
    pub save: usize,
}

/// The two levels of `pec` for the layer that has the most experts: a half and a quarter, unless asked otherwise.
///
/// ```
/// use evermoe::protection::{Levels, levels};
/// assert_eq!(levels(8, None, None), Levels { snapshot: 4, save: 2 });
/// assert_eq!(levels(8, None, Some(6)), Levels { snapshot: 6, save: 6 });
/// assert_eq!(levels(1, None, None), Levels { snapshot: 1, save: 1 });
/// ```
pub fn levels(experts: usize, per_snapshot: Option<usize>, per_save: Option<usize>) -> Levels {
    let save = per_save.unwrap_or((experts / 4).max(1)).min(experts);
    match (per_snapshot, per_save) {
        (None, _) => Levels { snapshot: save.max(experts / 2), save },
        (Some(snapshot), Some(_)) => Levels { snapshot: snapshot.min(experts), save },
        (Some(snapshot), None) => Levels { snapshot: snapshot.min(experts), save: save.min(snapshot) },
    }
}

/// Bytes that all members together can copy in a step, from the speed of each: bandwidth × time of a step (MoEtion,
/// Algorithm 1). None until all speeds are measured.
///
/// ```
/// use evermoe::protection::copy_budget;
/// assert_eq!(copy_budget(0.5, &[Some(1e6), Some(3e6)]), Some(2_000_000));
/// assert_eq!(copy_budget(0.5, &[Some(1e6), None]), None);
/// ```
pub fn copy_budget(step_seconds: f64, speeds: &[Option<f64>]) -> Option<u64> {
    let sum: f64 = speeds.iter().copied().collect::<Option<Vec<f64>>>()?.iter().sum();
    (!speeds.is_empty()).then_some((step_seconds * sum) as u64)
}

/// Bytes to peers that `moetion` may send in a step until speeds are measured: an eighth of the experts' state, or the
/// largest expert.
pub fn unmeasured_budget(expert_bytes: u64, all_bytes: u64) -> u64 {
    expert_bytes.max(all_bytes / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_in_the_order_of_their_names() {
        for (name, preset) in PresetName::ALL.into_iter().zip(&PRESETS) {
            assert_eq!((name, name.name().parse().unwrap()), (preset.name, name));
            assert!(
                !preset.kinds.is_empty() && preset.schedule.is_some() == (preset.copying != Copying::Nothing)
            );
        }
        assert!(
            "gemini2".parse::<PresetName>().unwrap_err().to_string().starts_with("preset: expected one of")
        );
    }
}
