//! The state machine of one member: steps, votes and recoveries. `member/asking.rs` handles membership.

mod asking;

use super::agreement::Agreement;
use super::event::{Begun, Command, Event, LastGroup, Participant, Passed, Stop};
use super::version::{generation_of, step_of, version_of};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Number of consecutive recoveries without a committed step after which a member stops.
pub const MAX_RECOVERIES: u32 = 20;

/// Constant settings of a member.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Unique id of this member.
    pub id: String,
    /// False for a replica node.
    pub trains: bool,
    /// Whether it takes part only if fewer than `members` train.
    pub is_spare: bool,
    /// Number of training members that a new job waits for.
    pub members: usize,
    /// Whether that number is needed throughout the job, as by the stages of a pipeline.
    pub is_fixed: bool,
    /// Whether it may continue although others continued without it: the operator has declared that no others do.
    pub allows_solo_resume: bool,
    /// Whether the job has several Lighthouses, so that only a majority of the last group continues.
    pub needs_majority: bool,
    /// Steps between two searches for new members; 0 for none.
    pub join_interval: u64,
    /// Steps between two decisions whether experts should move; 0 for none.
    pub rebalance_interval: u64,
    /// Newest generation found in this node's memory.
    pub generation: u64,
}

/// The command whose answer a member waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// In no group; the next `Look` asks for one.
    Apart,
    /// In a group; the next `Look` continues.
    Ready,
    Asking,
    Comparing,
    Waiting,
    Connecting,
    Weighing,
    Recalling,
    Restoring,
    Counting,
    Protecting,
    Stepping,
    Voting,
    Settling,
    Parting,
    Over,
}

/// The protocol of one member of a job, driven by events and answering with commands.
///
/// A job of one member, from the start to its first step:
/// ```
/// use evermoe::protocol::{Command, Event, Participant, Protocol, Settings};
/// let settings = Settings {
///     id: "a".into(), trains: true, is_spare: false, members: 1, is_fixed: false, allows_solo_resume: false, needs_majority: false,
///     join_interval: 5, rebalance_interval: 0, generation: 0,
/// };
/// let mut member = Protocol::new(settings);
/// let [Command::Ask { standing, .. }] = &member.handle(Event::Look { until: 10 })?[..] else { panic!() };
/// let me = Participant {
///     id: "a".into(), rank_key: "".into(), island: None, trains: true, waits: true, is_patient: false, unreachable: vec![],
///     standing: standing.clone(),
/// };
/// assert!(matches!(member.handle(Event::Quorum { id: 1, participants: vec![me], is_promoted: false })?[..], [Command::Connect { .. }]));
/// assert!(matches!(member.handle(Event::Connected)?[..], [Command::Recall { vote: None }]));
/// member.handle(Event::Recalled { votes: vec![None] })?;
/// member.handle(Event::Restored { version: 0, is_stale: false })?;
/// member.handle(Event::Counted)?;
/// let commands = member.handle(Event::Protected { is_whole: true })?;
/// assert!(matches!(commands[..], [Command::Resume { .. }, Command::Inquire { .. }, Command::Step { number: 0 }]));
/// # Ok::<(), evermoe::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Protocol {
    settings: Settings,
    phase: Phase,
    until: u64,
    version: u64,
    generation: u64,
    /// Numbers of the Lighthouse's sets that have named this member since the one that it adopted.
    named: Vec<(u64, u64)>,
    /// Number of the newest set whose members it was connected with, and its size.
    adopted: (u64, usize),
    /// The newest group that it was connected in, and groups that it has begun since; see `majority.rs`.
    last_group: Option<LastGroup>,
    begun: Vec<Begun>,
    known: u64,
    /// Number of the set whose group it is connecting.
    connecting: u64,
    established: bool,
    saw_progress: bool,
    /// The group that this member is connected in.
    group: Option<Agreement>,
    /// The version that results from the step on which this member has voted, until it knows the result. The version
    /// identifies the group: in the next group, members may vote on the same step with other gradients.
    pending: Option<u64>,
    /// The latest vote that passed here since the last recovery.
    last: Option<Passed>,
    /// The first step that this member has taken and not yet reported: it does not know yet that all members have taken
    /// it and that the copies are complete.
    unconfirmed: Option<u64>,
    is_stale: bool,
    /// Whether the recovery has given the state a version that previous copies do not have.
    is_renumbered: bool,
    /// The answer that a member of an intact group received: number and participants of the set.
    heard: Option<(u64, Vec<Participant>)>,
    /// Whether it has sent a background inquiry since its last other answer.
    inquires: bool,
    /// Whether it has withdrawn since its last group, with its island.
    has_withdrawn: bool,
    /// Whether this member has seen newcomers, and whether any member of the group has, by the last vote.
    calls: bool,
    is_called: bool,
    recoveries: u32,
    /// Whether this member leaves after the current step, and the number of members that do.
    leaves: bool,
    leaving: usize,
    /// See [`Event::Gradients`]; of the latest vote.
    lag: u64,
    /// Whether all steps are committed here: units that left with members that have received this one's farewell are
    /// not missed.
    is_done: bool,
    /// Whether it waits until it is needed; false once it has been.
    is_spare: bool,
    /// Whether spares were waiting when it was last answered.
    knows_spares: bool,
    failure: String,
}

impl Protocol {
    /// Creates a member that has just started: in no group, with no state of the job.
    pub fn new(settings: Settings) -> Self {
        Self {
            phase: Phase::Apart,
            until: 0,
            version: 0,
            generation: settings.generation,
            is_spare: settings.is_spare,
            settings,
            named: Vec::new(),
            adopted: (0, 0),
            last_group: None,
            begun: Vec::new(),
            known: 0,
            connecting: 0,
            established: false,
            saw_progress: false,
            group: None,
            pending: None,
            last: None,
            unconfirmed: None,
            is_stale: false,
            is_renumbered: false,
            heard: None,
            inquires: false,
            has_withdrawn: false,
            calls: false,
            is_called: false,
            recoveries: 0,
            leaves: false,
            leaving: 0,
            lag: 0,
            is_done: false,
            knows_spares: false,
            failure: String::new(),
        }
    }

    /// Version of this member's state.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Generation of the current group, or of the last one.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether this member has the job's state: it has completed a recovery.
    pub fn is_established(&self) -> bool {
        self.established
    }

    /// Whether this member can compute a step without a recovery.
    pub fn is_ready(&self) -> bool {
        matches!(self.phase, Phase::Ready | Phase::Stepping)
    }

    /// Whether the job is over for this member.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// Handles an event and returns the commands to execute.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the event does not answer the current command; nothing changes then.
    pub fn handle(&mut self, event: Event) -> Result<Vec<Command>> {
        Ok(match (self.phase, event) {
            (Phase::Over, Event::Lost { .. } | Event::Overheard { .. }) => vec![],
            (_, Event::Overheard { id, participants, is_refused }) => {
                self.overhear(id, &participants, is_refused)
            }
            (_, Event::Lost { reason }) => self.lose(reason),
            (Phase::Apart | Phase::Ready, Event::Look { until }) => self.look(until),
            (Phase::Asking, Event::Quorum { id, participants, .. }) if self.group.is_some() => {
                self.compare(Some((id, participants)))
            }
            (Phase::Asking, Event::Unanswered { refused, .. }) if self.group.is_some() => {
                self.note_refused(refused);
                self.compare(None)
            }
            (Phase::Comparing, Event::Compared { sets }) => self.compared(&sets),
            (Phase::Asking, Event::Quorum { id, participants, is_promoted }) => {
                self.judge(id, &participants, is_promoted)
            }
            (Phase::Asking, Event::Unanswered { reason, refused }) => {
                self.note_refused(refused);
                self.retry(reason)
            }
            (Phase::Asking | Phase::Waiting, Event::OutOfTime { reason }) => {
                self.stop(Stop::OutOfTime { reason })
            }
            (Phase::Waiting, Event::Waited) => vec![self.ask()],
            (Phase::Connecting, Event::Connected) => {
                self.connected();
                self.recall()
            }
            (Phase::Weighing, Event::Weighed { should_move: false }) => vec![self.go_on()],
            (Phase::Weighing, Event::Weighed { should_move: true }) => {
                self.generation += 1;
                self.recall()
            }
            (Phase::Recalling, Event::Recalled { votes }) => self.complete(votes),
            (Phase::Restoring, Event::Restored { version, is_stale }) => self.restored(version, is_stale),
            (Phase::Restoring, Event::Missing | Event::Unrecoverable) if self.is_done => self.close(),
            (Phase::Restoring, Event::Missing) => self.pause(),
            (Phase::Restoring, Event::Unrecoverable) => self.stop(Stop::UnitsLost),
            (Phase::Counting, Event::Counted) => self.protect(),
            (Phase::Protecting, Event::Protected { is_whole }) => self.resume(is_whole),
            (Phase::Stepping, Event::Gradients { is_whole, leaves, lag }) => self.vote(is_whole, leaves, lag),
            (Phase::Voting, Event::Tally { votes, leaving, newcomer_seen, sums }) => {
                self.count(votes, leaving, newcomer_seen, sums)
            }
            (Phase::Settling, Event::Settled { is_whole }) => self.settled(is_whole),
            (Phase::Parting, Event::Parted) => self.close(),
            (phase, event) => {
                return Err(Error::invalid(format!(
                    "protocol: {event:?} does not answer the current command: {phase:?}"
                )));
            }
        })
    }

    fn lose(&mut self, reason: String) -> Vec<Command> {
        // A recovery counts if its group was connected; attempts that never connected are bounded by the time for an
        // agreement.
        let counts = !matches!(self.phase, Phase::Apart | Phase::Asking | Phase::Waiting | Phase::Connecting);
        self.recoveries += u32::from(counts);
        self.group = None;
        self.leaving = 0;
        (self.calls, self.is_called) = (false, false);
        self.phase = Phase::Apart;
        self.failure.clone_from(&reason);
        vec![Command::Drop { reason }]
    }

    fn pause(&mut self) -> Vec<Command> {
        let recoveries = self.recoveries;
        let mut commands = self.lose("no member has some of the units in memory".into());
        self.recoveries = recoveries;
        commands.push(Command::Pause);
        commands
    }

    /// Ends: all steps are committed, and this member has sent its farewell or no other member is left to receive it.
    fn close(&mut self) -> Vec<Command> {
        self.phase = Phase::Over;
        vec![Command::Close { standing: self.knows_spares.then(|| self.standing()) }]
    }

    fn stop(&mut self, why: Stop) -> Vec<Command> {
        self.phase = Phase::Over;
        vec![Command::Stop(why)]
    }

    // ---- recovery

    fn recall(&mut self) -> Vec<Command> {
        self.phase = Phase::Recalling;
        vec![Command::Recall { vote: self.last.clone() }]
    }

    /// Takes the step whose vote others have seen pass, if this member could take it when it lost them.
    fn complete(&mut self, votes: Vec<Option<Passed>>) -> Vec<Command> {
        let mut commands = Vec::new();
        let pending = self.pending.take();
        let missed = votes
            .into_iter()
            .flatten()
            .find(|vote| pending == Some(vote.after) && vote.before == self.version);
        if let Some(vote) = missed {
            self.take(vote.clone());
            commands.push(Command::Take { vote, is_recalled: true });
        }
        self.phase = Phase::Restoring;
        let (established, saw_progress) = (self.established, self.saw_progress);
        commands.push(Command::Restore { version: self.version, established, saw_progress });
        commands
    }

    fn restored(&mut self, version: u64, is_stale: bool) -> Vec<Command> {
        if version > self.version || self.unconfirmed.is_some_and(|step| step_of(version) <= step) {
            self.unconfirmed = None; // the steps are those of others, or were taken here and undone before they were committed
        }
        self.version = version;
        self.generation = self.generation.max(generation_of(version) + 1);
        if version == 0 {
            // A process that has just started has this version, too: it must not count as a peer of training members.
            self.version = version_of(self.generation, 0);
        }
        self.is_stale = is_stale;
        self.distinguish();
        self.is_renumbered = self.version != version;
        self.phase = Phase::Counting;
        vec![Command::CountLosses { version: self.version }]
    }

    /// Assigns a new version to a state in which some experts were rolled back: others hold a different state under the
    /// old number.
    fn distinguish(&mut self) {
        if self.is_stale {
            self.version = version_of(self.generation, step_of(self.version));
            self.generation += 1;
        }
    }

    fn protect(&mut self) -> Vec<Command> {
        self.distinguish(); // the losses are part of the state
        self.is_stale = false;
        self.phase = Phase::Protecting;
        // If a member is lost before the next vote, its units come from previous copies, which must be of the state's
        // version.
        let waits = self.is_renumbered || step_of(self.version) >= self.until;
        vec![Command::Protect { version: self.version, generation: self.generation, waits }]
    }

    fn resume(&mut self, is_whole: bool) -> Vec<Command> {
        let mut commands = if is_whole { self.confirm() } else { vec![] };
        self.established = true;
        self.last = None; // all members continue from the same version; how they got to it no longer matters
        commands.push(Command::Resume { version: self.version });
        commands.extend(self.inquire());
        commands.push(self.go_on());
        commands
    }

    // ---- steps

    fn go_on(&mut self) -> Command {
        let number = step_of(self.version);
        if number < self.until {
            self.phase = Phase::Stepping;
            return if self.settings.trains { Command::Step { number } } else { Command::Follow { number } };
        }
        if self.unconfirmed.is_some() {
            self.phase = Phase::Settling;
            return Command::Settle;
        }
        self.phase = Phase::Parting;
        self.is_done = true;
        Command::Farewell { version: self.version }
    }

    fn vote(&mut self, is_whole: bool, leaves: bool, lag: u64) -> Vec<Command> {
        self.leaves = leaves;
        self.lag = lag;
        if let Some(last_group) = &mut self.last_group {
            last_group.leaves |= leaves && step_of(self.version) + 1 < self.until;
        }
        self.pending = is_whole.then_some(self.stepped());
        self.phase = Phase::Voting;
        vec![Command::Vote { version: self.version, calls: std::mem::take(&mut self.calls) }]
    }

    fn count(&mut self, votes: usize, leaving: usize, newcomer_seen: usize, sums: Vec<i64>) -> Vec<Command> {
        let size = self.group.as_ref().map_or(0, |group| group.members.len());
        if votes != size {
            self.pending = None;
            return self.lose(format!("{votes} of {size} members voted for the step"));
        }
        let step = step_of(self.version);
        let mut commands = self.confirm_before(step.saturating_sub(self.lag));
        let vote = Passed { before: self.version, after: self.stepped(), sums };
        self.take(vote.clone());
        commands.push(Command::Take { vote, is_recalled: false });
        self.recoveries = 0;
        self.phase = Phase::Ready;
        self.is_called = newcomer_seen > 0 && step + 1 < self.until;
        if leaving > 0 && step + 1 < self.until {
            // Members that stay will have the units of those that leave, so no step is repeated.
            self.leaving = leaving;
            if let Some(last_group) = &mut self.last_group {
                last_group.left = leaving;
            }
            self.phase = Phase::Settling;
            commands.push(Command::Settle);
        }
        commands
    }

    /// Version after one more step in this group.
    fn stepped(&self) -> u64 {
        version_of(self.generation, step_of(self.version) + 1)
    }

    fn take(&mut self, vote: Passed) {
        self.pending = None;
        self.unconfirmed.get_or_insert(step_of(vote.before));
        self.version = vote.after;
        self.last = Some(vote);
    }

    /// Commits all steps: all members have the state and its copies are complete, so no failure that the preset covers
    /// can undo them.
    fn confirm(&mut self) -> Vec<Command> {
        self.confirm_before(step_of(self.version))
    }

    /// Commits the steps before `end`: the complete copies are of the state after that number of steps.
    fn confirm_before(&mut self, end: u64) -> Vec<Command> {
        let taken = step_of(self.version);
        let first = self.unconfirmed.unwrap_or(taken).min(taken);
        self.unconfirmed = self.unconfirmed.map(|first| first.max(end)).filter(|first| *first < taken);
        (first..end).map(|step| Command::Commit { step }).collect()
    }

    fn settled(&mut self, is_whole: bool) -> Vec<Command> {
        if !is_whole {
            return self.lose("the copies of the last step are not complete".into());
        }
        let mut commands = self.confirm();
        if self.leaving == 0 {
            commands.push(self.go_on());
        } else if self.leaves {
            self.phase = Phase::Over;
            commands.push(Command::Leave);
        } else {
            let who =
                if self.leaving == 1 { "1 member has" } else { &format!("{} members have", self.leaving) };
            commands.extend(self.lose(format!("{who} left the job")));
        }
        commands
    }
}
