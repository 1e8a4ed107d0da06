//! Copies of a training job's ranks, given the copies that data-parallel peers hold in any case: MoEtion's
//! redundancy-aware placement, in the form that its text promises.

mod cluster;

use crate::ensure;
use crate::error::Result;
use cluster::Cluster;
use std::collections::BTreeMap;

/// Holders of the same parameters and optimizer state for each rank, itself first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingHolders {
    /// Holders of each rank's parameters.
    pub parameters: Vec<Vec<usize>>,
    /// Holders of each rank's optimizer state.
    pub optimizer: Vec<Vec<usize>>,
}

/// Returns, for each rank of a training job, `copies` ranks that hold its parameters and `copies` that hold its
/// optimizer state.
///
/// Rank r runs on `nodes[r]`, has the data-parallel coordinate `data_parallel[r]` and the pipeline stage `pipeline[r]`.
/// Ranks of one stage are data-parallel peers (with tensor or expert parallelism, give each part of a stage its own
/// number). ZeRO stage 0 replicates parameters and optimizer state over the peers, 1 and 2 parameters only, 3 neither.
/// First come the rank itself and the peers that hold the same in any case, one of each node. Only if these are fewer
/// than `copies`, further ranks receive a copy: on nodes without one, the next in the order of names, least burdened
/// first. All ranks of a stage count a replicated state's copies as theirs, so it is sent once.
///
/// With fewer nodes than `copies`, a node keeps more than one. Ranks receive the same number of copies, to within one,
/// where the nodes allow it: no chain of moves makes the numbers more even. If every rank is the only holder of its
/// state, they are equal whenever possible (ranks ≥ `copies` × the ranks of the largest node).
///
/// ```
/// // Four nodes; ranks 0 and 1 are peers in stage 0, ranks 2 and 3 in stage 1.
/// let (nodes, data, stages) = (["a", "b", "c", "d"], [0, 1, 0, 1], [0, 0, 1, 1]);
/// let found = evermoe::placement::training_copy_holders(&nodes, &data, &stages, 2, 1)?;
/// // Peers have the parameters; their optimizer states are parts (ZeRO 1) and go to the next node.
/// assert_eq!(found.parameters, [vec![0, 1], vec![1, 0], vec![2, 3], vec![3, 2]]);
/// assert_eq!(found.optimizer, [vec![0, 1], vec![1, 2], vec![2, 3], vec![3, 0]]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if the lists differ in length, two ranks share coordinate and
/// stage, `copies` is 0 or more than the number of ranks, or `zero_stage` is more than 3.
pub fn training_copy_holders<S: Ord>(
    nodes: &[S],
    data_parallel: &[usize],
    pipeline: &[usize],
    copies: usize,
    zero_stage: usize,
) -> Result<TrainingHolders> {
    check(nodes.len(), data_parallel, pipeline, copies)?;
    ensure!(zero_stage <= 3, "zero_stage: expected 0 to 3, got {zero_stage}");
    let cluster = Cluster::new(nodes);
    let replicated = || cluster.holders(pipeline, copies);
    // A part that no other rank has is a stage of its own.
    let sharded = || cluster.holders(&(0..nodes.len()).collect::<Vec<_>>(), copies);
    let parameters = if zero_stage < 3 { replicated() } else { sharded() };
    let optimizer = if zero_stage == 0 { replicated() } else { sharded() };
    Ok(TrainingHolders { parameters, optimizer })
}

fn check(ranks: usize, data_parallel: &[usize], pipeline: &[usize], copies: usize) -> Result<()> {
    for (name, list) in [("data_parallel", data_parallel), ("pipeline", pipeline)] {
        ensure!(
            list.len() == ranks,
            "{name}: expected a number for each of the {ranks} ranks of nodes, got {}",
            list.len()
        );
    }
    ensure!(copies > 0, "copies: expected 1 (the rank itself) or more, got 0");
    ensure!(copies <= ranks.max(1), "copies: expected at most {ranks}, the number of ranks, got {copies}");
    let mut rank_at = BTreeMap::new();
    for (rank, place) in data_parallel.iter().zip(pipeline).enumerate() {
        if let Some(other) = rank_at.insert(place, rank) {
            ensure!(
                false,
                "pipeline: ranks {other} and {rank} both have data-parallel coordinate {} in stage {}; number the \
                 parts of a stage that are not replicas of each other",
                place.0,
                place.1
            );
        }
    }
    Ok(())
}
