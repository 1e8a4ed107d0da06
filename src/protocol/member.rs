//! The state machine of one member: steps, votes and recoveries. Who takes part is in `member/asking.rs`.

mod asking;

use super::agreement::Agreement;
use super::event::{Begun, Command, Event, Participant, Passed, Seat, Stop};
use super::version::{generation_of, step_of, version_of};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Recoveries in a row without a committed step, after which a member gives up.
pub const MAX_RECOVERIES: u32 = 20;

/// What does not change while a member runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Name of this member, which no other process shares.
    pub id: String,
    /// False for a replica node.
    pub trains: bool,
    /// Whether it takes part only if fewer than `members` train.
    pub is_spare: bool,
    /// Members that train, for which a new job waits.
    pub members: usize,
    /// Whether that many are needed always: the seats of a pipeline.
    pub is_fixed: bool,
    /// Whether it goes on although others went on without it: their operator has said that nobody else does.
    pub goes_on_alone: bool,
    /// Whether the job has several Lighthouses, so that only a majority of the last members goes on.
    pub needs_majority: bool,
    /// Steps between looks for new members; 0 for none.
    pub join_interval: u64,
    /// Steps between looks whether experts should move; 0 for none.
    pub rebalance_interval: u64,
    /// Newest generation that this node's memory names.
    pub generation: u64,
}

/// The command whose answer a member waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// In no group; the next `Look` asks for one.
    Apart,
    /// In a group; the next `Look` goes on.
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

/// One member of a job. Feed it what happens, and do what it says.
///
/// A job of one member, from the start to its first step:
/// ```
/// use evermoe::protocol::{Command, Event, Participant, Protocol, Settings};
/// let settings = Settings {
///     id: "a".into(), trains: true, is_spare: false, members: 1, is_fixed: false, goes_on_alone: false, needs_majority: false,
///     join_interval: 5, rebalance_interval: 0, generation: 0,
/// };
/// let mut member = Protocol::new(settings);
/// let [Command::Ask { standing, .. }] = &member.handle(Event::Look { until: 10 })?[..] else { panic!() };
/// let me = Participant {
///     id: "a".into(), rank_key: "".into(), trains: true, waits: true, is_patient: false, unreachable: vec![],
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
    /// Numbers of the Lighthouse's sets that named this member since the one that it adopted.
    named: Vec<(u64, u64)>,
    /// Number of the newest set whose members it has been connected with, and how many they are.
    adopted: (u64, usize),
    /// The newest group that it was connected in, and those that it has begun since; see `majority.rs`.
    seat: Option<Seat>,
    begun: Vec<Begun>,
    known: u64,
    /// Number of the set whose group it connects.
    connecting: u64,
    established: bool,
    saw_progress: bool,
    /// The group that this member is connected in.
    group: Option<Agreement>,
    /// The version that the step makes for which this member has voted, while it does not know the result. It names the
    /// group: members may vote on the same step again in the next one, with other gradients.
    pending: Option<u64>,
    /// The latest vote that passed here since the last recovery.
    last: Option<Passed>,
    /// The first of the steps that this member has taken and not reported: it does not know yet whether all members have
    /// taken them, and that the copies are whole.
    unconfirmed: Option<u64>,
    is_stale: bool,
    /// Whether the recovery has given the state a version that copies of before do not have.
    is_renumbered: bool,
    /// What an intact group's member has heard: the number of the set, and who is in it.
    heard: Option<(u64, Vec<Participant>)>,
    /// Whether it has asked beside training since it was last answered otherwise.
    inquires: bool,
    /// Whether this member has heard of newcomers, and whether any member of the group has, as the vote said.
    calls: bool,
    is_called: bool,
    recoveries: u32,
    /// Whether this member leaves after the step that is under way, and how many do.
    leaves: bool,
    leaving: usize,
    /// See [`Event::Gradients`], of the latest vote.
    lag: u64,
    /// Whether all steps are committed here: units that left with members who have heard this one's farewell are not
    /// missed.
    is_done: bool,
    /// Whether it waits until it is needed; no more once it has been.
    is_spare: bool,
    /// Whether spares were waiting when it was last answered.
    knows_spares: bool,
    failure: String,
}

impl Protocol {
    /// A member that has just started: in no group, with no state of the job.
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
            seat: None,
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

    /// Generation of the group, or of the last one.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether this member got through a recovery of the job: it has the job's state.
    pub fn is_established(&self) -> bool {
        self.established
    }

    /// Whether this member has a step to go on with, or will have without a recovery.
    pub fn is_ready(&self) -> bool {
        matches!(self.phase, Phase::Ready | Phase::Stepping)
    }

    /// Whether all is over for this member.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// What to do now that `event` has happened.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the event answers another command than the one that is under way; nothing changes then.
    pub fn handle(&mut self, event: Event) -> Result<Vec<Command>> {
        Ok(match (self.phase, event) {
            (Phase::Over, Event::Lost { .. } | Event::Overheard { .. }) => vec![],
            (_, Event::Overheard { id, participants }) => self.overhear(id, &participants),
            (_, Event::Lost { reason }) => self.lose(reason),
            (Phase::Apart | Phase::Ready, Event::Look { until }) => self.look(until),
            (Phase::Asking, Event::Quorum { id, participants, .. }) if self.group.is_some() => {
                self.compare(Some((id, participants)))
            }
            (Phase::Asking, Event::Unanswered { named, .. }) if self.group.is_some() => {
                self.note_refused(named);
                self.compare(None)
            }
            (Phase::Comparing, Event::Compared { sets }) => self.compared(&sets),
            (Phase::Asking, Event::Quorum { id, participants, is_promoted }) => {
                self.judge(id, &participants, is_promoted)
            }
            (Phase::Asking, Event::Unanswered { reason, named }) => {
                self.note_refused(named);
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
            (Phase::Voting, Event::Tally { votes, leaving, calling, sums }) => {
                self.count(votes, leaving, calling, sums)
            }
            (Phase::Settling, Event::Settled { is_whole }) => self.settled(is_whole),
            (Phase::Parting, Event::Parted) => self.close(),
            (phase, event) => {
                return Err(Error::invalid(format!(
                    "protocol: {event:?} does not answer what is under way: {phase:?}"
                )));
            }
        })
    }

    fn lose(&mut self, reason: String) -> Vec<Command> {
        // What was connected and got no further counts; what never connected is bounded by the time for an agreement.
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
        let mut commands = self.lose("some units are in nobody's memory".into());
        self.recoveries = recoveries;
        commands.push(Command::Pause);
        commands
    }

    /// All steps are committed and this member has said farewell, or nobody is left who could hear it.
    fn close(&mut self) -> Vec<Command> {
        self.phase = Phase::Over;
        vec![Command::Close { standing: self.knows_spares.then(|| self.standing()) }]
    }

    fn stop(&mut self, why: Stop) -> Vec<Command> {
        self.phase = Phase::Over;
        vec![Command::Stop(why)]
    }

    // ---- a recovery

    fn recall(&mut self) -> Vec<Command> {
        self.phase = Phase::Recalling;
        vec![Command::Recall { vote: self.last.clone() }]
    }

    /// Takes the step that others have seen pass, if this member could take it when it lost them.
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
            self.unconfirmed = None; // the steps of the others, or taken here but undone before they were committed
        }
        self.version = version;
        self.generation = self.generation.max(generation_of(version) + 1);
        if version == 0 {
            // A process that has just come has this version, too: it must not count as a peer of those that train.
            self.version = version_of(self.generation, 0);
        }
        self.is_stale = is_stale;
        self.distinguish();
        self.is_renumbered = self.version != version;
        self.phase = Phase::Counting;
        vec![Command::CountLosses { version: self.version }]
    }

    /// Gives a state in which some experts were rolled back a version of its own: others hold a different state under
    /// the same number.
    fn distinguish(&mut self) {
        if self.is_stale {
            self.version = version_of(self.generation, step_of(self.version));
            self.generation += 1;
        }
    }

    fn protect(&mut self) -> Vec<Command> {
        self.distinguish(); // what was lost is part of the state
        self.is_stale = false;
        self.phase = Phase::Protecting;
        // Who is lost before the next vote leaves its units in the copies of before; these must be of the state's version.
        let waits = self.is_renumbered || step_of(self.version) >= self.until;
        vec![Command::Protect { version: self.version, generation: self.generation, waits }]
    }

    fn resume(&mut self, is_whole: bool) -> Vec<Command> {
        let mut commands = if is_whole { self.confirm() } else { vec![] };
        self.established = true;
        self.last = None; // all go on from the same version: how they got there does not matter any more
        commands.push(Command::Resume { version: self.version });
        commands.extend(self.inquire());
        commands.push(self.go_on());
        commands
    }

    // ---- a step

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
        if let Some(seat) = &mut self.seat {
            seat.leaves |= leaves && step_of(self.version) + 1 < self.until;
        }
        self.pending = is_whole.then_some(self.stepped());
        self.phase = Phase::Voting;
        vec![Command::Vote { version: self.version, calls: std::mem::take(&mut self.calls) }]
    }

    fn count(&mut self, votes: usize, leaving: usize, calling: usize, sums: Vec<i64>) -> Vec<Command> {
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
        self.is_called = calling > 0 && step + 1 < self.until;
        if leaving > 0 && step + 1 < self.until {
            // Those who stay will have what the others hold: nothing has to be repeated.
            self.leaving = leaving;
            if let Some(seat) = &mut self.seat {
                seat.left = leaving;
            }
            self.phase = Phase::Settling;
            commands.push(Command::Settle);
        }
        commands
    }

    /// The version after one more step in this group.
    fn stepped(&self) -> u64 {
        version_of(self.generation, step_of(self.version) + 1)
    }

    fn take(&mut self, vote: Passed) {
        self.pending = None;
        self.unconfirmed.get_or_insert(step_of(vote.before));
        self.version = vote.after;
        self.last = Some(vote);
    }

    /// All members have the state, and its copies are whole: nothing that the preset covers can undo its steps.
    fn confirm(&mut self) -> Vec<Command> {
        self.confirm_before(step_of(self.version))
    }

    /// Those of the steps before `end`, as the copies that are whole are of the state that has taken so many.
    fn confirm_before(&mut self, end: u64) -> Vec<Command> {
        let taken = step_of(self.version);
        let first = self.unconfirmed.unwrap_or(taken).min(taken);
        self.unconfirmed = self.unconfirmed.map(|first| first.max(end)).filter(|first| *first < taken);
        (first..end).map(|step| Command::Commit { step }).collect()
    }

    fn settled(&mut self, is_whole: bool) -> Vec<Command> {
        if !is_whole {
            return self.lose("the copies of the last step are not whole".into());
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
