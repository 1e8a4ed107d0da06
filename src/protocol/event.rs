//! What a member of a job learns, and what it then does: the two halves of the protocol's interface.

use serde::{Deserialize, Serialize};

/// A vote that passed: all members had whole gradients, so the step is taken by all.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Passed {
    /// Version of the state before the step.
    pub before: u64,
    /// Version of the state after the step.
    pub after: u64,
    /// Sums over all members' ballots (loss, squares of gradients, …), which the protocol only passes on: the bits of
    /// float64 values, so that a member that recalls the vote uses the very same numbers.
    pub sums: Vec<i64>,
}

/// What a member tells the Lighthouse about itself, and so all others.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standing {
    /// The connected group that the member is in; none if it is in none.
    pub epoch: Option<u64>,
    /// Whether it has state of the running job.
    pub established: bool,
    /// Members of the latest group that it was connected in; 0 before the first.
    pub size: usize,
    /// Generation of its latest agreement or rebalance, or the newest that its node's memory names.
    pub generation: u64,
    /// Generation that made its state; 0 for a newcomer.
    pub state: u64,
    /// Whether its state has taken a step: without one there is nothing to lose.
    pub has_progress: bool,
    /// Numbers of the sets after `adopted` that named it, as the Lighthouse counts: the first and the last of each run; the
    /// latest 64 at most.
    pub named: Vec<(u64, u64)>,
    /// Number of the newest set whose members it was connected with; 0 for none.
    pub adopted: u64,
    /// Whether it has asked beside training since it was last answered otherwise: more sets than `named` may have named it.
    pub inquires: bool,
    /// Whether all steps are committed and it has come to the end: what it lacks, others have taken along that are through.
    pub is_done: bool,
    /// Whether it takes part only if a member that trains is missing. No more once it has begun to.
    pub is_spare: bool,
    /// The newest group that it was connected in. None before the first, and where the job has one Lighthouse.
    pub seat: Option<Seat>,
    /// The newest state that was in any group that it has begun: of its own or of other members. 0 where the job has one
    /// Lighthouse.
    pub known: u64,
    /// Groups that it has begun to connect since, of which it does not know whether all came. None where the job has one
    /// Lighthouse.
    pub begun: Vec<Begun>,
}

/// A group that a member was connected in.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seat {
    /// Names the group.
    pub epoch: u64,
    /// Generation of its agreement.
    pub generation: u64,
    /// How many members it has.
    pub size: usize,
    /// Whether the member that tells it has the lowest id of them.
    pub is_first: bool,
    /// Whether the member that tells it has voted there to leave.
    pub leaves: bool,
    /// How many members left, if it knows that the vote at which they did has passed; else 0.
    pub left: usize,
}

/// Groups of the same members that a member has begun to connect, one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Begun {
    /// Their members, in the order of their ids.
    pub members: Vec<String>,
    /// The epoch of each, which names it, and the generation of its agreement.
    pub groups: Vec<(u64, u64)>,
}

/// One member of a set that the Lighthouse named.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Participant {
    /// Its name, which no other process shares.
    pub id: String,
    /// Ranks follow the order of these, then of the names.
    pub rank_key: String,
    /// False for a replica node; replica nodes have the last ranks.
    pub trains: bool,
    /// Whether it waits for the answer. One that trains asks on the side, to hear of newcomers.
    pub waits: bool,
    /// Whether it still gives absent members time to reach a Lighthouse that has just come back.
    pub is_patient: bool,
    /// Members that it could not reach when it asked.
    pub unreachable: Vec<String>,
    /// What it has told.
    pub standing: Standing,
}

/// Something that happened to a member. All but `Look` and `Lost` answer a command.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case", deny_unknown_fields)]
pub enum Event {
    /// The driver is free to do what comes next.
    Look {
        /// Steps after which the job is over.
        until: u64,
    },
    /// A peer is gone or silent, or the group was dropped here.
    Lost {
        /// Why, for people.
        reason: String,
    },
    /// Answers `Ask`: the Lighthouse names a set that has this member.
    Quorum {
        /// Number of the set; it grows by one whenever the set changes.
        id: u64,
        /// The set, without members of other jobs.
        participants: Vec<Participant>,
        /// Whether the operator says, in this set, that its members go on though others may be missing.
        is_promoted: bool,
    },
    /// The Lighthouse has answered `Inquire`; at any time.
    Overheard {
        /// As in `Quorum`.
        id: u64,
        /// As in `Quorum`; empty for a set that names this member and is not to be believed otherwise.
        participants: Vec<Participant>,
    },
    /// Answers `Ask`: no Lighthouse answered, or with a set that is not to be believed.
    Unanswered {
        /// Why, for people.
        reason: String,
        /// Number of that set, if it names this member: nothing happens in it without this member.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        named: Option<u64>,
    },
    /// Answers `Compare`: what each member of the group has heard, by rank.
    Compared {
        /// See `Compare`.
        sets: Vec<Option<u64>>,
    },
    /// Answers `Ask` or `Wait`: the time for an agreement is used up.
    OutOfTime {
        /// What it was spent on, for people.
        reason: String,
    },
    /// Answers `Wait`.
    Waited,
    /// Answers `Weigh`: whether any member wants experts to move; the same on all.
    Weighed {
        /// True if experts shall move.
        should_move: bool,
    },
    /// Answers `Connect`.
    Connected,
    /// Answers `Recall`: the latest passed vote of each member, by rank.
    Recalled {
        /// None for a member that has seen none since the last recovery.
        votes: Vec<Option<Passed>>,
    },
    /// Answers `Restore`: all units that this member needs are here, as of one version. What only an update of them needs
    /// may still be on its way: the ballot of the next step waits for it.
    Restored {
        /// The version that all members have.
        version: u64,
        /// Whether some experts are older than it: that state is another one than the version's own.
        is_stale: bool,
    },
    /// Answers `Restore`: some units are nowhere, and their holders may still come back.
    Missing,
    /// Answers `Restore`: some units are nowhere, and nobody waits for their holders any more.
    Unrecoverable,
    /// Answers `CountLosses`.
    Counted,
    /// Answers `Protect`.
    Protected {
        /// Whether the copies that the preset promises are whole on all members; else they are by the next vote. The same
        /// on all.
        is_whole: bool,
    },
    /// Answers `Step` or `Follow`: the ballot of this member.
    Gradients {
        /// Whether its gradients, and the copies that must be safe before the step, are whole.
        is_whole: bool,
        /// Whether it wants to leave the job after the step.
        leaves: bool,
        /// Steps by which the copies that are whole with this vote are behind the state before the step: none, unless a
        /// version of the copies takes several steps. The same on all members.
        lag: u64,
    },
    /// Answers `Vote`.
    Tally {
        /// Members whose ballot was whole.
        votes: usize,
        /// Members that want to leave after the step.
        leaving: usize,
        /// Members that have heard of newcomers.
        calling: usize,
        /// See [`Passed::sums`].
        sums: Vec<i64>,
    },
    /// Answers `Settle`: whether the copies of the last step are whole on all members.
    Settled {
        /// True if they are.
        is_whole: bool,
    },
    /// Answers `Farewell`: all members have said it.
    Parted,
}

/// Why a member gives up.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum Stop {
    /// The time for an agreement is used up.
    OutOfTime {
        /// What it was spent on, for people.
        reason: String,
    },
    /// The others agreed without this member since it last took part, and none of them is here.
    LeftBehind {
        /// Number of the newest set that a member here has adopted.
        adopted: u64,
        /// Number of the set now.
        id: u64,
    },
    /// The job is over, and this spare was not needed.
    Finished,
    /// Some units survive nowhere.
    UnitsLost,
    /// Recoveries follow each other without a committed step.
    NoProgress {
        /// How many there were.
        recoveries: u32,
        /// The latest failure, for people.
        reason: String,
    },
}

/// Why a member waits and asks again.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum Wait {
    /// This one is a spare, and all members that train are there, or still come to a new job.
    Spare,
    /// Too few members have come.
    Members {
        /// Those that train.
        found: usize,
        /// How many are needed.
        needed: usize,
    },
    /// Absent members may just be slow to reach a Lighthouse that has come back.
    Absent,
    /// Some members cannot reach each other: those that are to withdraw have not done so yet.
    Cut,
    /// The members train. They have heard of this one now, and will ask once they are between two steps.
    Training,
    /// What some members have told is too old: they trained when they asked, and their group has broken since. Or it
    /// cannot be told yet whether members were left behind: some have not heard an answer, or it was lost.
    Unheard,
    /// The job has several Lighthouses, and too few members of the last group are here to go on, or none with the newest
    /// state that they know of: others may do so.
    Minority {
        /// Those that are here.
        found: usize,
        /// Members of that group.
        size: usize,
    },
    /// The members here were left behind and stop; what this one has not got yet is not theirs to give.
    LeftBehind,
}

/// Something that the driver does. Of the commands of one event only the last is answered by an event; `Inquire` may be,
/// later.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Close all connections to the members, so that peers that wait for this one notice.
    Drop {
        /// Why, for people.
        reason: String,
    },
    /// Ask the Lighthouse who takes part. Answer: `Quorum`, `Unanswered` or `OutOfTime`.
    Ask {
        /// What to tell about this member.
        standing: Standing,
        /// Whether the group is intact: an absent member may only be slow, and if no answer comes soon, `Unanswered` is
        /// one.
        is_intact: bool,
    },
    /// Ask the Lighthouse beside training whether there are newcomers, now and from time to time until the group is lost.
    /// Whatever comes of it, nobody waits: `Overheard`, at any time or never.
    Inquire {
        /// What to tell about this member.
        standing: Standing,
    },
    /// Gather what the members of the group have heard, as all must go on alike. Answer: `Compared` or `Lost`.
    Compare {
        /// A digest of the Lighthouse's answer; none if there was none.
        set: Option<u64>,
    },
    /// Wait a little. Answer: `Waited` or `OutOfTime`.
    Wait(Wait),
    /// Tell the Lighthouse nothing more until the others can be reached, or some time has passed. Answer: `Waited` or
    /// `OutOfTime`.
    Withdraw,
    /// End what is under way in the old group and connect the new one. Answer: `Connected` or `Lost`.
    Connect {
        /// Names the group; no other group has this name.
        epoch: u64,
        /// All versions that are made in the group carry this generation or a later one.
        generation: u64,
        /// By rank; those that train come first.
        members: Vec<String>,
        /// How many of them train.
        num_trainers: usize,
    },
    /// Ask all members whether the load has shifted so far that experts should move. Answer: `Weighed` or `Lost`.
    Weigh,
    /// Gather the latest passed vote of every member. Answer: `Recalled` or `Lost`.
    Recall {
        /// This member's.
        vote: Option<Passed>,
    },
    /// Take the step: it is decided, and cannot fail.
    Take {
        /// The vote.
        vote: Passed,
        /// Whether this member learns it from others, after a loss.
        is_recalled: bool,
    },
    /// Survey what survives, and fetch what this member needs. Answer: `Restored`, `Missing`, `Unrecoverable` or
    /// `Lost`.
    Restore {
        /// Version of the state that this member has.
        version: u64,
        /// Whether it is state of the running job.
        established: bool,
        /// Whether this member has seen one that has taken steps of the job: it is then never started again from step 0.
        saw_progress: bool,
    },
    /// Count what was lost, and agree on it. Answer: `Counted` or `Lost`.
    CountLosses {
        /// Version of the state now.
        version: u64,
    },
    /// Plan who keeps copies of what, and make those that are missing. Answer: `Protected` or `Lost`.
    Protect {
        /// Version of the state now.
        version: u64,
        /// Generation that the copies belong to.
        generation: u64,
        /// Whether the copies must be whole before training goes on. Else they may be made beside the next step: its ballot
        /// says that they are whole, and copies of before stay until its vote has passed.
        waits: bool,
    },
    /// The recovery is over: training goes on.
    Resume {
        /// Version of the state now.
        version: u64,
    },
    /// Compute the gradients of a step and finish what must be safe before it. Answer: `Gradients` or `Lost`.
    Step {
        /// Steps taken before it.
        number: u64,
    },
    /// As `Step`, on a replica node, which computes nothing.
    Follow {
        /// Steps taken before it.
        number: u64,
    },
    /// Add up all ballots. Answer: `Tally` or `Lost`.
    Vote {
        /// Version of the state before the step.
        version: u64,
        /// Whether this member has heard of newcomers.
        calls: bool,
    },
    /// Report a step as committed: no failure that the preset covers can undo it.
    Commit {
        /// Steps taken before it.
        step: u64,
    },
    /// Wait for the copies of the last step, everywhere. Answer: `Settled` or `Lost`.
    Settle,
    /// All steps are done: write the last checkpoint, verify, and wait for all. Answer: `Parted` or `Lost`.
    Farewell {
        /// Version of the state at the end.
        version: u64,
    },
    /// Wait until holders of missing units may have come back; `Look` again then.
    Pause,
    /// Leave the job, which is not over: the steps so far are committed, and their copies are whole on the others.
    Leave,
    /// Leave the job: it is over.
    Close {
        /// What to tell spares that wait at the Lighthouse, so that they learn of the end; none if none do. Nobody waits long
        /// for that.
        standing: Option<Standing>,
    },
    /// Give up.
    Stop(Stop),
}
