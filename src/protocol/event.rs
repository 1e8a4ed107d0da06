//! Events and commands: the interface between a member's protocol and its driver.

use serde::{Deserialize, Serialize};

/// A vote that passed: all members had complete gradients, so all take the step.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Passed {
    /// Version of the state before the step.
    pub before: u64,
    /// Version of the state after the step.
    pub after: u64,
    /// Sums over the ballots of all members (loss, squares of gradients, …), as the bits of float64 values. The
    /// protocol only passes them on, so that a member that recalls the vote uses exactly the same numbers.
    pub sums: Vec<i64>,
}

/// A member's report about itself to the Lighthouse, and through it to all others.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standing {
    /// The connected group that the member is in, if any.
    pub epoch: Option<u64>,
    /// Whether the member has state of the running job.
    pub established: bool,
    /// Size of the latest group that it was connected in; 0 before the first.
    pub size: usize,
    /// Generation of its latest agreement or rebalance, or the newest generation found in its node's memory.
    pub generation: u64,
    /// Generation that made its state; 0 for a newcomer.
    pub state: u64,
    /// Whether its state has taken a step; without one there is nothing to lose.
    pub has_progress: bool,
    /// Numbers of the sets after `adopted` that named it, in the Lighthouse's count: first and last of each run, at
    /// most the latest 64 runs.
    pub named: Vec<(u64, u64)>,
    /// Number of the newest set whose members it was connected with; 0 for none.
    pub adopted: u64,
    /// Whether it has sent a background inquiry since its last other answer: more sets than those in `named` may have
    /// named it.
    pub inquires: bool,
    /// Whether it has finished with all steps committed; any state that it lacks left with members that have finished.
    pub is_done: bool,
    /// Whether it takes part only while a training member is missing; false once it has begun to train.
    pub is_spare: bool,
    /// The newest group that it was connected in. None before the first, or if the job has one Lighthouse.
    pub last_group: Option<LastGroup>,
    /// The newest state in any group that it has begun, its own or another member's. 0 if the job has one Lighthouse.
    pub known: u64,
    /// Groups that it has begun to connect since, without knowing whether all members connected. Empty if the job has
    /// one Lighthouse.
    pub begun: Vec<Begun>,
}

/// A group that a member was connected in.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LastGroup {
    /// Unique name of the group.
    pub epoch: u64,
    /// Generation of its agreement.
    pub generation: u64,
    /// Number of its members.
    pub size: usize,
    /// Whether the reporting member has the lowest id in the group.
    pub is_first: bool,
    /// Whether the reporting member voted in the group to leave.
    pub leaves: bool,
    /// Number of members that left, if it is known that the vote on their departure passed; else 0.
    pub left: usize,
}

/// Groups of the same members that a member began to connect, one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Begun {
    /// The members, in the order of their ids.
    pub members: Vec<String>,
    /// Epoch and generation of each group.
    pub groups: Vec<(u64, u64)>,
}

/// The place of a process in its island.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Island {
    /// Name of the island; each start of it has another one.
    pub name: String,
    /// Position of the process, from 0. The processes of one position hold the same shards.
    pub position: usize,
    /// Number of positions.
    pub size: usize,
}

/// One member of a set that the Lighthouse named.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Participant {
    /// Unique name of the member.
    pub id: String,
    /// Sort key of ranks; members with equal keys are sorted by id.
    pub rank_key: String,
    /// Its place in its island, if it has one.
    pub island: Option<Island>,
    /// False for a replica node; replica nodes have the last ranks.
    pub trains: bool,
    /// Whether it waits for the answer. A training member asks in the background, to learn of newcomers.
    pub waits: bool,
    /// Whether it still gives absent members time to reach a Lighthouse that has just restarted.
    pub is_patient: bool,
    /// Members that it could not reach when it asked.
    pub unreachable: Vec<String>,
    /// Its report.
    pub standing: Standing,
}

/// An event of a member. All but `Look` and `Lost` answer a command.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case", deny_unknown_fields)]
pub enum Event {
    /// The driver is ready for the next action.
    Look {
        /// Number of steps of the job.
        until: u64,
    },
    /// A peer is lost or silent, or this member dropped the group.
    Lost {
        /// Reason for the log.
        reason: String,
    },
    /// Answers `Ask`: the Lighthouse names a set that contains this member.
    Quorum {
        /// Number of the set; it grows by one whenever the set changes.
        id: u64,
        /// The set, without members of other jobs.
        participants: Vec<Participant>,
        /// Whether the operator declares in this set that its members continue although others may be missing.
        is_promoted: bool,
    },
    /// Answers `Inquire`, at any time.
    Overheard {
        /// As in `Quorum`.
        id: u64,
        /// As in `Quorum`.
        participants: Vec<Participant>,
        /// Whether the set is refused; see [`Refused`].
        is_refused: bool,
    },
    /// Answers `Ask`: no Lighthouse answered, or it answered with an untrustworthy set.
    Unanswered {
        /// Reason for the log.
        reason: String,
        /// That set, if it names this member.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        refused: Option<Refused>,
    },
    /// Answers `Compare`: the answers that the members of the group received, by rank.
    Compared {
        /// See `Compare`.
        sets: Vec<Option<u64>>,
    },
    /// Answers `Ask` or `Wait`: the time for an agreement has run out.
    OutOfTime {
        /// Reason for the log.
        reason: String,
    },
    /// Answers `Wait`.
    Waited,
    /// Answers `Weigh`: whether any member wants experts to move; the same on all members.
    Weighed {
        /// True if experts should move.
        should_move: bool,
    },
    /// Answers `Connect`.
    Connected,
    /// Answers `Recall`: the latest passed vote of each member, by rank.
    Recalled {
        /// None for a member that has seen no vote pass since the last recovery.
        votes: Vec<Option<Passed>>,
    },
    /// Answers `Restore`: all units that this member needs are present and of one version. Optimizer state that only an
    /// update needs may still be on its way; the ballot of the next step waits for it.
    Restored {
        /// The version that all members now have.
        version: u64,
        /// Whether some experts are older: that state differs from the original state of this version.
        is_stale: bool,
    },
    /// Answers `Restore`: no member has some of the units, but their holders may still return.
    Missing,
    /// Answers `Restore`: no member has some of the units, and nobody waits for their holders any longer.
    Unrecoverable,
    /// Answers `CountLosses`.
    Counted,
    /// Answers `Protect`.
    Protected {
        /// Whether the copies that the preset promises are complete on all members; if not, they are by the next vote.
        /// The same on all members.
        is_whole: bool,
    },
    /// Answers `Step` or `Follow`: the ballot of this member.
    Gradients {
        /// Whether its gradients are complete, and also the copies that must be safe before the step.
        is_whole: bool,
        /// Whether it wants to leave the job after the step.
        leaves: bool,
        /// Number of steps by which the copies that this vote completes lag behind the state before the step. 0 unless
        /// a version of the copies takes several steps. The same on all members.
        lag: u64,
    },
    /// Answers `Vote`.
    Tally {
        /// Members with complete ballots.
        votes: usize,
        /// Members that want to leave after the step.
        leaving: usize,
        /// Members that have seen newcomers.
        newcomer_seen: usize,
        /// See [`Passed::sums`].
        sums: Vec<i64>,
    },
    /// Answers `Settle`: whether the copies of the last step are complete on all members.
    Settled {
        /// True if they are.
        is_whole: bool,
    },
    /// Answers `Farewell`: all members have answered it.
    Parted,
}

/// An untrustworthy set that names this member. It refuses the set, and nothing happens under it without this member,
/// unless its island is incomplete in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refused {
    /// Number of the set.
    pub id: u64,
    /// As in `Quorum`.
    pub participants: Vec<Participant>,
}

/// Reason why a member ends.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum Stop {
    /// The time for an agreement has run out.
    OutOfTime {
        /// Reason for the log.
        reason: String,
    },
    /// The others agreed without this member since it last took part, and none of them is present.
    LeftBehind {
        /// Number of the newest set that a present member has adopted.
        adopted: u64,
        /// Number of the current set.
        id: u64,
    },
    /// This member has state of the job, and its island has lost a process.
    IslandLost {
        /// Number of present positions.
        found: usize,
        /// Number of positions.
        size: usize,
    },
    /// The job has finished, and this spare was not needed.
    Finished,
    /// No copy of some units survives.
    UnitsLost,
    /// Recoveries followed each other without a committed step.
    NoProgress {
        /// Number of these recoveries.
        recoveries: u32,
        /// The latest failure, for the log.
        reason: String,
    },
}

/// Why a member waits and asks again.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum Wait {
    /// This member is a spare, and all training members are present, or may still come to a new job.
    Spare,
    /// Too few members have arrived.
    Members {
        /// Number of training members.
        found: usize,
        /// Number of members needed.
        needed: usize,
    },
    /// Processes of this member's island are missing.
    Island {
        /// Number of present positions.
        found: usize,
        /// Number of positions.
        size: usize,
    },
    /// Absent members may only be slow to reach a Lighthouse that has restarted.
    Absent,
    /// Some members cannot reach each other, and those that should withdraw have not done so yet.
    Cut,
    /// The members are training. They have now seen this member, and will ask once they are between two steps.
    Training,
    /// Reports of some members are outdated: they trained when they asked, and their group has broken since. Or it
    /// cannot be decided yet whether members were left behind: some have received no answer, or it was lost.
    Unheard,
    /// The job has several Lighthouses. Too few members of the last group are present to continue, or none has the
    /// newest known state: other members may have continued.
    Minority {
        /// Number of present members.
        found: usize,
        /// Size of that group.
        size: usize,
    },
    /// The present members were left behind and will stop; they cannot provide the state that this member lacks.
    LeftBehind,
}

/// A command to the driver. Only the last command of an event is answered by an event; `Inquire` may be answered later.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Close all connections to the members, so that peers that wait for this member notice.
    Drop {
        /// Reason for the log.
        reason: String,
    },
    /// Ask the Lighthouse for the members. Answer: `Quorum`, `Unanswered` or `OutOfTime`.
    Ask {
        /// Report of this member.
        standing: Standing,
        /// Whether the group is intact. Then an absent member may only be slow, and `Unanswered` is sent if no answer
        /// arrives soon.
        is_intact: bool,
    },
    /// Ask the Lighthouse for newcomers in the background, now and from time to time, until the group is lost. No step
    /// waits for the answer: `Overheard`, at any time or never.
    Inquire {
        /// Report of this member.
        standing: Standing,
    },
    /// Gather the answers that the members of the group received, as all must decide the same. Answer: `Compared` or
    /// `Lost`.
    Compare {
        /// Digest of the Lighthouse's answer; none if it did not answer.
        set: Option<u64>,
    },
    /// Wait for a moment. Answer: `Waited` or `OutOfTime`.
    Wait(Wait),
    /// Send no reports to the Lighthouse until the others can be reached, or some time has passed. Answer: `Waited` or
    /// `OutOfTime`.
    Withdraw,
    /// Finish the old group's work in progress and connect the new group. Answer: `Connected` or `Lost`.
    Connect {
        /// Unique name of the group.
        epoch: u64,
        /// All versions that are made in the group carry this generation or a later one.
        generation: u64,
        /// Ids by rank; training members come first.
        members: Vec<String>,
        /// Number of training members.
        num_trainers: usize,
    },
    /// Ask all members whether the load has shifted enough for experts to move. Answer: `Weighed` or `Lost`.
    Weigh,
    /// Gather the latest passed vote of every member. Answer: `Recalled` or `Lost`.
    Recall {
        /// The latest passed vote of this member.
        vote: Option<Passed>,
    },
    /// Take the step. It is decided and cannot fail.
    Take {
        /// The vote.
        vote: Passed,
        /// Whether this member learned of the vote from others after a loss.
        is_recalled: bool,
    },
    /// Survey the surviving state and fetch the units that this member needs. Answer: `Restored`, `Missing`,
    /// `Unrecoverable` or `Lost`.
    Restore {
        /// Version of the state that this member has.
        version: u64,
        /// Whether it is state of the running job.
        established: bool,
        /// Whether this member has seen another that had taken steps; if so, the job is never restarted from step 0.
        saw_progress: bool,
    },
    /// Count the losses and agree on them. Answer: `Counted` or `Lost`.
    CountLosses {
        /// Current version of the state.
        version: u64,
    },
    /// Plan the holders of all copies, and make the missing ones. Answer: `Protected` or `Lost`.
    Protect {
        /// Current version of the state.
        version: u64,
        /// Generation that the copies belong to.
        generation: u64,
        /// Whether the copies must be complete before training resumes. If not, they may be made during the next step:
        /// its ballot reports that they are complete, and previous copies are kept until its vote has passed.
        waits: bool,
    },
    /// The recovery is over and training resumes.
    Resume {
        /// Current version of the state.
        version: u64,
    },
    /// Compute the gradients of a step and finish what must be safe before it. Answer: `Gradients` or `Lost`.
    Step {
        /// Number of steps taken before it.
        number: u64,
    },
    /// Like `Step`, on a replica node, which computes nothing.
    Follow {
        /// Number of steps taken before it.
        number: u64,
    },
    /// Add up all ballots. Answer: `Tally` or `Lost`.
    Vote {
        /// Version of the state before the step.
        version: u64,
        /// Whether this member has seen newcomers.
        calls: bool,
    },
    /// Report a step as committed: no failure that the preset covers can undo it.
    Commit {
        /// Number of steps taken before it.
        step: u64,
    },
    /// Wait until the copies of the last step are complete on all members. Answer: `Settled` or `Lost`.
    Settle,
    /// All steps are done: write the last checkpoint, verify it, and wait for all members. Answer: `Parted` or `Lost`.
    Farewell {
        /// Version of the final state.
        version: u64,
    },
    /// Wait until holders of missing units may have returned; then send `Look` again.
    Pause,
    /// Leave the job before its end: the steps so far are committed, and their copies are complete on the others.
    Leave,
    /// Leave the job, which has finished.
    Close {
        /// Report to spares that wait at the Lighthouse, from which they learn of the end; none if none wait. The
        /// driver does not wait long for its delivery.
        standing: Option<Standing>,
    },
    /// Stop with this reason.
    Stop(Stop),
}
