//! Python bindings of [`crate::protection`]: tuples in, tuples out.

use crate::placement::Survival;
use crate::protection::{self, CopyNode, CopyReason, CopyRequest, CopyUnit, Limit, PresetName};
use crate::schedule::Link;
use pyo3::prelude::*;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(choose_copies, module)?)?;
    module.add_function(wrap_pyfunction!(plan_protection, module)?)
}

/// State bytes, gradient bytes, active ranks, tokens, replayable, may lag.
type UnitInfoRow = (u64, u64, Vec<usize>, f64, bool, bool);

/// Node, free bytes, trains, step seconds, network seconds, log bytes, link, host speed.
type RankInfoRow = (String, u64, bool, Option<f64>, Option<f64>, u64, Option<(f64, f64)>, Option<f64>);

/// Kind, period, primary, holders, own.
type UnitProtectionRow = (&'static str, usize, usize, Vec<usize>, Vec<usize>);

#[pyfunction]
fn plan_protection(
    py: Python<'_>,
    preset: &str,
    units: Vec<UnitInfoRow>,
    ranks: Vec<RankInfoRow>,
    copies: usize,
    budget: f64,
) -> PyResult<(Vec<UnitProtectionRow>, String)> {
    let preset = preset.parse::<PresetName>()?.preset();
    let unit = |(state_bytes, gradient_bytes, active, tokens, replayable, may_lag)| protection::UnitInfo {
        state_bytes,
        gradient_bytes,
        active,
        tokens,
        replayable,
        may_lag,
    };
    let rank =
        |(node, free_bytes, trains, step_seconds, network_seconds, log_bytes, link, host_speed): RankInfoRow| {
            let link = link.map(|(alpha, beta)| Link { alpha, beta });
            protection::RankInfo {
                node,
                free_bytes,
                trains,
                step_seconds,
                network_seconds,
                log_bytes,
                link,
                host_speed,
            }
        };
    let units: Vec<_> = units.into_iter().map(unit).collect();
    let ranks: Vec<_> = ranks.into_iter().map(rank).collect();
    let request = protection::ProtectionRequest { preset, units: &units, ranks: &ranks, copies, budget };
    let found = py.detach(|| protection::plan_protection(&request))?;
    let row = |kept: protection::UnitProtection| {
        (kept.kind.name(), kept.kind.period(), kept.primary, kept.holders, kept.own)
    };
    Ok((found.units.into_iter().map(row).collect(), found.summary))
}

/// State bytes, gradient bytes, active nodes, tokens, replayable.
type UnitRow = (u64, u64, Vec<usize>, f64, bool);

/// Failure, domain, host bytes, device bytes, network seconds, host link seconds.
type NodeRow = (f64, usize, u64, u64, f64, f64);

/// Node, memory.
type HolderRow = (usize, &'static str);

/// Kind, period, sender, holders, bytes, memory bytes, covered, most lost steps, lost tokens, reason, summary.
type ChoiceRow =
    (&'static str, usize, usize, Vec<HolderRow>, u64, u64, bool, usize, f64, &'static str, String);

/// Sent, received, network seconds, host link seconds, host bytes, device bytes.
type UseRow = (u64, u64, f64, f64, u64, u64);

type SurvivalRow = (f64, f64, Option<u64>);

/// Units, nodes, delay, lost tokens, survival (failures, without loss, with loss), summary.
type PlanRow = (Vec<ChoiceRow>, Vec<UseRow>, f64, f64, Vec<(usize, SurvivalRow, SurvivalRow)>, String);

#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "one for each argument of the Python function")]
fn choose_copies(
    py: Python<'_>,
    units: Vec<UnitRow>,
    nodes: Vec<NodeRow>,
    network: (f64, f64),
    host_link: (f64, f64),
    step_seconds: f64,
    copies: usize,
    budget: f64,
    max_period: usize,
    persist_period: usize,
    log_steps: u64,
) -> PyResult<PlanRow> {
    let unit = |(state_bytes, gradient_bytes, active, tokens, replayable)| CopyUnit {
        state_bytes,
        gradient_bytes,
        active,
        tokens,
        replayable,
    };
    let node = |(failure, domain, host_bytes, device_bytes, network_seconds, host_link_seconds)| CopyNode {
        failure,
        domain,
        host_bytes,
        device_bytes,
        network_seconds,
        host_link_seconds,
    };
    let units: Vec<CopyUnit> = units.into_iter().map(unit).collect();
    let nodes: Vec<CopyNode> = nodes.into_iter().map(node).collect();
    let link = |(alpha, beta)| Link { alpha, beta };
    let request = CopyRequest {
        units: &units,
        nodes: &nodes,
        network: link(network),
        host_link: link(host_link),
        step_seconds,
        copies,
        budget,
        max_period,
        persist_period,
        log_steps,
    };
    Ok(to_row(py.detach(|| protection::choose_copies(&request))?))
}

fn to_row(plan: protection::CopyPlan) -> PlanRow {
    let units = plan.units.into_iter().map(choice_row).collect();
    let nodes = plan.nodes.into_iter().map(|node| {
        let protection::NodeUse { sent_bytes, received_bytes, .. } = node;
        let seconds = (node.network_seconds, node.host_link_seconds);
        (sent_bytes, received_bytes, seconds.0, seconds.1, node.host_bytes, node.device_bytes)
    });
    let tuple = |found: Survival| (found.probability, found.error, found.samples);
    let survival = plan.survival.into_iter();
    let survival = survival.map(|found| (found.failures, tuple(found.without_loss), tuple(found.with_loss)));
    (units, nodes.collect(), plan.delay_seconds, plan.lost_tokens, survival.collect(), plan.summary)
}

fn choice_row(choice: protection::UnitChoice) -> ChoiceRow {
    (
        choice.kind.name(),
        choice.kind.period(),
        choice.sender,
        choice.holders.iter().map(|holder| (holder.node, holder.memory.name())).collect(),
        choice.bytes,
        choice.memory_bytes,
        choice.covered,
        choice.most_lost_steps,
        choice.lost_tokens,
        reason_name(choice.reason),
        choice.reason.to_string(),
    )
}

fn reason_name(reason: CopyReason) -> &'static str {
    match reason {
        CopyReason::HeldActively { .. } => "held_actively",
        CopyReason::Idle => "idle",
        CopyReason::GradientIsSmaller => "gradient_is_smaller",
        CopyReason::StateIsSmaller => "state_is_smaller",
        CopyReason::NotReplayable => "not_replayable",
        CopyReason::ReplayHasNoRoom => "replay_has_no_room",
        CopyReason::SnapshotHasNoRoom => "snapshot_has_no_room",
        CopyReason::Limited(Limit::Domains) => "too_few_domains",
        CopyReason::Limited(Limit::Time { .. }) => "no_time",
        CopyReason::Limited(Limit::Memory { .. }) => "no_memory",
    }
}
