//! Placement of experts on nodes by policy: the entry point to the constructions and the choice between them.

use super::adjust::adjusted;
use super::candidate::Candidate;
use super::choose::{balanced, classic, safest};
use super::domains::domain_of;
use super::layout::Problem;
use super::result::{Construction, Placement};
use super::rows::rows_of;
use crate::dispatch::check_load;
use crate::ensure;
use crate::error::{Error, Result};
use std::str::FromStr;

/// Maximum (node, expert) pairs of a placement: half a gigabyte of table.
const MAX_CELLS: usize = 1 << 26;
/// Maximum replicas of a placement.
pub(super) const MAX_REPLICAS: usize = 1 << 24;

/// Policy of a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Lazarus' maximum rank overlap, as in the paper, over domains. Theorem 1 fails if the last group is cut by the
    /// number of domains.
    Mro,
    /// Replicas in the order of the experts, dealt to the nodes in turn, or to the domains.
    Spread,
    /// Replicas in the order of the experts, node after node.
    Compact,
    /// The most survival at the given number of losses; never less than the best of the three above.
    Safest,
    /// The most even placement within 5 points of the survival of `Mro` and `Spread`, if the better of them survives at
    /// least half of the losses; below that no placement protects, and evenness alone decides. No other policy's
    /// placement that has every expert on as many domains is better in both evenness and survival, at these losses or
    /// at one more; with more than 4,096 (node, expert) pairs a percent of evenness does not count. With a previous
    /// placement: one that moves little, if its busiest node has at most 1.05 times the mean load or little more than
    /// the minimum. If more than 15 % of the replicas would move, the previous placement itself is kept up to 1.05 /
    /// 0.95 times that load, which a drift of all loads by 5 % can cause.
    Balanced,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 5] = [Self::Mro, Self::Spread, Self::Compact, Self::Safest, Self::Balanced];

    /// The name in Python.
    pub fn name(self) -> &'static str {
        ["mro", "spread", "compact", "safest", "balanced"][self as usize]
    }
}

impl FromStr for Policy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = Self::ALL.into_iter().find(|policy| policy.name() == name);
        known.ok_or_else(|| {
            Error::invalid(format!(
                "policy: expected one of mro, spread, compact, safest, balanced, got {name:?}"
            ))
        })
    }
}

/// Replicas to place, with the nodes and the policy.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// `[experts]` replicas; they sum to `nodes · slots`.
    pub replicas: &'a [i64],
    /// Number of nodes.
    pub nodes: usize,
    /// Replicas that each node holds.
    pub slots: usize,
    /// Policy of the placement.
    pub policy: Policy,
    /// `[experts]` tokens, or any other measure of work; without it every replica counts the same.
    pub load: Option<&'a [f64]>,
    /// `[nodes, experts]` current replicas of these nodes, zero rows for new ones.
    pub previous: Option<&'a [i64]>,
    /// Nodes that fail together; an unlisted node fails alone.
    pub domains: Option<&'a [Vec<usize>]>,
    /// Simultaneous losses of domains at which survival is weighed. Default: the minimum number of replicas of an
    /// expert; for `balanced` at least 2, as one loss is survived by either all placements or hardly any.
    pub failures: Option<usize>,
}

/// Places replicas on nodes.
///
/// ```
/// use evermoe::placement::{Policy, Request, place};
/// let request = Request {
///     replicas: &[3, 2, 1], nodes: 3, slots: 2, policy: Policy::Balanced,
///     load: Some(&[30.0, 20.0, 10.0]), previous: None, domains: None, failures: None,
/// };
/// let placement = place(&request)?;
/// assert_eq!(placement.matrix, [1, 1, 0,  1, 1, 0,  1, 0, 1]);
/// // Rank 2 held experts 0 and 1, rank 1 held 0 and 2, rank 0 is new: it fetches two, no other rank moves.
/// let previous = [0, 0, 0,  1, 0, 1,  1, 1, 0];
/// let placement = place(&Request { previous: Some(&previous), ..request })?;
/// assert_eq!(placement.matrix, [1, 1, 0,  1, 0, 1,  1, 1, 0]);
/// assert_eq!(placement.reason.moved, Some(2));
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// With every policy each node gets exactly `slots` replicas. With `safest` and `balanced` every expert is on at least
/// `min(f, nodes)` distinct nodes, where f is the minimum number of replicas of any expert. `balanced` puts it on as
/// many nodes as it has replicas (evenly on all of them if it has more), unless another policy is safer or more even.
/// With `domains`, exchanges extend that to `min(f, domains)` distinct ones where possible:
/// [`Reason::spread`](super::Reason::spread) is the number reached. Among equally safe candidates, `safest` takes the
/// one with the fewest new replicas since `previous`. Its survival does not depend on the order of the experts.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if the replicas do not sum to `nodes · slots`, an expert has none,
/// a load is negative or not finite, `previous` has another size, domains overlap, or `failures` is 0 or more than the
/// number of domains.
pub fn place(request: &Request<'_>) -> Result<Placement> {
    let problem = problem_of(request)?;
    let replicas = request.replicas;
    let unchanged = adjusted(&problem.previous, replicas, request.slots, &problem.weight);
    let unchanged = unchanged.map(|rows| Candidate::new(&problem, Construction::Previous, rows));
    let candidate = match request.policy {
        Policy::Balanced => balanced(&problem, unchanged),
        Policy::Safest => safest(&problem, unchanged),
        Policy::Mro => classic(&problem, Construction::Mro).settled(&problem),
        Policy::Spread => classic(&problem, Construction::Spread).settled(&problem),
        Policy::Compact => classic(&problem, Construction::Compact).settled(&problem),
    };
    Ok(candidate.into_placement(&problem))
}

/// Checks the request and subtracts the replicas that every node holds anyway.
pub(super) fn problem_of(request: &Request<'_>) -> Result<Problem> {
    let Request { replicas, nodes, slots, .. } = *request;
    check(request)?;
    let domain = domain_of(nodes, request.domains.unwrap_or(&[]))?;
    let domains = domain.iter().max().map_or(0, |last| last + 1);
    let fewest = replicas.iter().min().map_or(0, |&fewest| usize::try_from(fewest).unwrap_or(0));
    let spread = widest(&domain, domains, slots, replicas.len(), fewest);
    let at_least = if request.policy == Policy::Balanced { fewest.max(2) } else { spread };
    let failures = request.failures.unwrap_or(at_least.min(domains));
    ensure!(
        (1..=domains).contains(&failures),
        "failures: expected 1 to {domains}, the number of {}, got {failures}",
        if domains == nodes { "nodes" } else { "domains" }
    );
    let each: Vec<usize> = replicas.iter().map(|&count| count as usize / nodes).collect();
    let weight = |expert: usize| match request.load {
        Some(load) => load[expert] / replicas[expert] as f64,
        None => 1.0,
    };
    Ok(Problem {
        nodes,
        experts: replicas.len(),
        slots: slots - each.iter().sum::<usize>(),
        wanted: replicas.iter().map(|&count| count as usize % nodes).collect(),
        each,
        weight: (0..replicas.len()).map(weight).collect(),
        domain,
        domains,
        spread,
        failures,
        previous: rows_of(request.previous.unwrap_or(&[]), replicas.len()),
    })
}

/// Number of domains that every expert can be on at once, up to `most`: small domains have no room for all experts.
fn widest(domain: &[usize], domains: usize, slots: usize, experts: usize, most: usize) -> usize {
    let mut room = vec![0; domains];
    domain.iter().for_each(|&domain| room[domain] += slots);
    let distinct: usize = room.into_iter().map(|room| room.min(experts)).sum();
    most.min(distinct / experts).clamp(1, domains)
}

fn check(request: &Request<'_>) -> Result<()> {
    let Request { replicas, nodes, slots, .. } = *request;
    let experts = replicas.len();
    ensure!(nodes > 0 && slots > 0, "nodes, slots: expected 1 or more, got {nodes} nodes × {slots} slots");
    if let Some(expert) = replicas.iter().position(|&count| count < 1) {
        ensure!(false, "replicas: expert {expert} has {}; expected 1 or more", replicas[expert]);
    }
    let places = nodes.saturating_mul(slots);
    ensure!(places <= MAX_REPLICAS, "slots: {nodes} nodes × {slots} slots are more than 2^24 replicas");
    ensure!(
        nodes.saturating_mul(experts) <= MAX_CELLS,
        "nodes: {nodes} nodes × {experts} experts are more than 2^26; plan fewer layers or nodes at a time"
    );
    let sum: i128 = replicas.iter().map(|&count| i128::from(count)).sum();
    ensure!(
        sum == places as i128,
        "replicas: they sum to {sum}; expected {nodes} nodes × {slots} slots = {places}"
    );
    let size = request.previous.map_or(nodes * experts, <[i64]>::len);
    ensure!(
        size == nodes * experts,
        "previous: expected {nodes} nodes × {experts} experts, got {size} numbers"
    );
    if let Some(cell) = request.previous.and_then(|previous| previous.iter().position(|&count| count < 0)) {
        let (node, expert) = (cell / experts, cell % experts);
        ensure!(
            false,
            "previous: node {node} has a negative number of replicas of expert {expert}; counts start at 0"
        );
    }
    let Some(load) = request.load else { return Ok(()) };
    ensure!(
        load.len() == experts,
        "load: expected one number for each of {experts} experts, got {}",
        load.len()
    );
    check_load(load)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(replicas: &[i64]) -> Request<'_> {
        Request {
            replicas,
            nodes: 2,
            slots: 2,
            policy: Policy::Balanced,
            load: None,
            previous: None,
            domains: None,
            failures: None,
        }
    }

    #[test]
    fn more_replicas_than_nodes_are_spread_evenly() {
        let placement = place(&Request { slots: 4, ..request(&[5, 3]) }).unwrap();
        assert_eq!(placement.matrix, [3, 1, 2, 2]);
    }

    #[test]
    fn one_replica_more_is_one_fetch() {
        // Expert 2 gains the replica that expert 0 loses: one fetch, by the node that gives expert 0 up.
        let previous = [1, 1, 0, 1, 1, 0, 1, 0, 1];
        let again = Request { nodes: 3, previous: Some(&previous), ..request(&[2, 2, 2]) };
        assert_eq!(place(&again).unwrap().reason.moved, Some(1));
    }

    #[test]
    fn errors_name_the_argument() {
        let message = |request: Request<'_>| place(&request).unwrap_err().to_string();
        assert!(
            message(request(&[2, 1])).contains("replicas: they sum to 3; expected 2 nodes × 2 slots = 4")
        );
        assert!(message(request(&[4, 0])).contains("replicas: expert 1 has 0"));
        let previous = Some(&[1, 1][..]);
        assert!(
            message(Request { previous, ..request(&[2, 2]) })
                .contains("previous: expected 2 nodes × 2 experts, got 2")
        );
        let load = Some(&[1.0, f64::NAN][..]);
        assert!(message(Request { load, ..request(&[2, 2]) }).contains("load: expert 1 has load NaN"));
        assert!(
            message(Request { failures: Some(3), ..request(&[2, 2]) }).contains("failures: expected 1 to 2")
        );
    }
}
