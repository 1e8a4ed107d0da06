//! The copies that count in a recovery: those of an earlier start are no progress of the running job.

use super::{Holding, Kind};
use crate::protocol::step_of;

/// A member's knowledge of its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Knowledge {
    /// Whether it has state of the running job.
    pub established: bool,
    /// Whether it has seen a member that had taken steps of the job.
    pub saw_progress: bool,
}

/// Returns the holdings that a recovery may use, by rank.
///
/// * No member is established or has seen progress: the job begins, from the members' own models as of version 0.
///   Copies of an earlier start that took no step are no progress.
/// * No member is established, but members were seen that had taken steps: the job's state is in copies with a version
///   other than 0. A newly built model must not stand in for it.
/// * Otherwise all holdings count.
///
/// ```
/// use evermoe::recovery::{Holding, Kind, Knowledge, usable};
/// let fresh = Holding { unit: 0, version: 0, digest: 7, kind: Kind::Active };
/// let newcomer = Knowledge { established: false, saw_progress: true };
/// assert_eq!(usable(&[newcomer], vec![vec![fresh]]), [vec![]]); // the job runs elsewhere: it is not started again
/// ```
pub fn usable(members: &[Knowledge], mut holdings: Vec<Vec<Holding>>) -> Vec<Vec<Holding>> {
    let is_new = !members.iter().any(|member| member.established);
    let had_progress = members.iter().any(|member| member.saw_progress);
    let has_progress = holdings.iter().flatten().any(|holding| step_of(holding.version) > 0);
    for held in &mut holdings {
        if is_new && !had_progress && !has_progress {
            held.retain(|holding| holding.kind == Kind::Active);
            held.iter_mut().for_each(|holding| holding.version = 0);
        } else if is_new && had_progress {
            held.retain(|holding| holding.version > 0);
        }
    }
    holdings
}
