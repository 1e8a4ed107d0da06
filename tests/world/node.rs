//! One member: the product's protocol, with a driver as thin as the product's.

use super::copies::{Content, Copies, Holdings, Keeper, Snapshot, expand, kept, previous, trained};
use super::group::Part;
use super::pace::Pace;
use super::planned::Planned;
use super::{Mistake, Setting, World};
use evermoe::protocol::{
    Command, Event, Participant, Passed, Protocol, Settings, Standing, Stop, Wait, step_of,
};
use evermoe::recovery::{Knowledge, plan, usable};

/// State of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Life {
    Absent,
    Up,
    Frozen,
    Dead,
    /// It has ended by itself.
    Gone,
}

/// State of a member between two events.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Task {
    Idle,
    Asking,
    Answered {
        id: u64,
        participants: Vec<Participant>,
    },
    Waiting,
    /// It has withdrawn, and its heartbeat has stopped.
    Withdrawn,
    /// Units are missing, and their holders may return.
    Pausing,
    /// Gradients and copies are in transit.
    Copying {
        epoch: u64,
        is_last: bool,
    },
    Collective {
        epoch: u64,
    },
}

/// One process and its node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Node {
    pub life: Life,
    pub protocol: Protocol,
    pub task: Task,
    /// The Lighthouse that it asks.
    pub lighthouse: usize,
    /// Whether it has finished the job.
    pub is_done: bool,
    /// Whether it was frozen or out of reach.
    pub was_away: bool,
    /// Whether it waits for a majority.
    pub is_minority: bool,
    pub is_patient: bool,
    /// Whether it has looked again for missing units since a member woke up.
    pub has_paused: bool,
    /// Its running state.
    pub content: Content,
    /// One bit per step that it has taken and not reported.
    unreported: u8,
    /// Units that it trains.
    pub active: u8,
    /// Those whose optimizer state is in transit; it arrives before the member votes on a step.
    pub late: u8,
    pub copies: Copies,
    /// The group that it is connected in.
    pub group: Option<u64>,
    /// The Lighthouse's answer during training.
    pub overheard: Option<(u64, Vec<Participant>)>,
    /// Whether it has received notice to leave, which it reports in each vote.
    pub leaves: bool,
    /// The copies that it makes during its step.
    pub planned: Option<Planned>,
    /// The versions of its snapshots.
    pub pace: Pace,
    /// Target of the recovery.
    target: Option<(u64, Content)>,
}

impl Node {
    pub(crate) fn new(number: usize, setting: &Setting) -> Self {
        let settings = Settings {
            id: name(number),
            trains: true,
            is_spare: setting.has_spare && number >= setting.members,
            members: setting.members,
            is_fixed: false,
            allows_solo_resume: false,
            needs_majority: setting.lighthouses > 1 && setting.mistake != Some(Mistake::MinorityContinues),
            join_interval: 1,
            rebalance_interval: 0,
            generation: 0,
        };
        Self {
            life: Life::Absent,
            protocol: Protocol::new(settings),
            task: Task::Idle,
            lighthouse: 0,
            is_done: false,
            was_away: false,
            is_minority: false,
            is_patient: false,
            has_paused: false,
            content: Content::default(),
            unreported: 0,
            active: u8::try_from((1_u32 << units(setting)) - 1).expect("a few units"),
            late: 0,
            copies: Copies::default(),
            group: None,
            overheard: None,
            leaves: false,
            planned: None,
            pace: Pace::from(0),
            target: None,
        }
    }

    /// Makes a member dead; dead members have no state that could differ.
    pub(crate) fn die(&mut self, number: usize, setting: &Setting) {
        *self = Self { life: Life::Dead, ..Self::new(number, setting) };
    }

    /// Versions and states of this member, running or as copies.
    pub(crate) fn held(&self) -> impl Iterator<Item = (u64, Content)> + '_ {
        let own = (self.life != Life::Dead).then_some((self.protocol.version(), self.content));
        own.into_iter().chain(self.copies.snapshots().map(|each| (each.version, each.content)))
    }

    fn survey(&self) -> Holdings {
        let units = self.active & !self.late;
        let own = Snapshot { units, version: self.protocol.version(), content: self.content };
        [(own, true)].into_iter().chain(self.copies.snapshots().map(|each| (each, false))).collect()
    }
}

pub(crate) fn name(number: usize) -> String {
    char::from(b'a' + u8::try_from(number).expect("a few members")).to_string()
}

impl World {
    /// Passes an event to a member's protocol, and executes the commands.
    pub(crate) fn feed(&mut self, number: usize, event: Event, setting: &Setting) {
        self.nodes[number].task = Task::Idle;
        let commands =
            self.nodes[number].protocol.handle(event).expect("the event answers the current command");
        for command in commands {
            self.execute(number, command, setting);
        }
        if self.nodes[number].task == Task::Idle && self.nodes[number].life == Life::Up {
            self.feed(number, Event::Look { until: setting.steps }, setting);
        }
    }

    fn execute(&mut self, number: usize, command: Command, setting: &Setting) {
        match command {
            Command::Drop { .. } => self.drop_group(number),
            Command::Ask { standing, is_intact } => self.ask(number, standing, is_intact, setting),
            Command::Inquire { standing } => {
                if self.inquiries_left > 0 {
                    self.inquiries_left -= 1;
                    self.ask_lighthouse(number, standing, false, setting);
                }
            }
            Command::Compare { set } => self.enter_now(number, Part::Compare(set)),
            Command::Wait(why) => {
                self.nodes[number].task = Task::Waiting;
                self.nodes[number].is_minority = matches!(why, Wait::Minority { .. });
            }
            Command::Withdraw => self.nodes[number].task = Task::Withdrawn,
            Command::Connect { epoch, members, .. } => {
                self.nodes[number].is_minority = false;
                self.drop_group(number);
                let members: Vec<usize> =
                    members.iter().map(|name| usize::from(name.as_bytes()[0] - b'a')).collect();
                self.check_islands(&members, setting);
                self.nodes[number].group = Some(epoch);
                self.enter(number, members, Part::Connect);
            }
            Command::Recall { vote } => self.enter_now(number, Part::Recall(vote)),
            Command::Take { vote, is_recalled } => self.take(number, &vote, is_recalled, setting),
            Command::Restore { established, saw_progress, .. } => {
                let knowledge = Knowledge { established, saw_progress };
                let holdings = self.nodes[number].survey();
                self.enter_now(number, Part::Survey { knowledge, holdings });
            }
            Command::CountLosses { .. } => self.feed(number, Event::Counted, setting),
            Command::Protect { version, waits, .. } => {
                let node = &self.nodes[number];
                let snapshot = Snapshot { units: node.active, version, content: node.content };
                self.enter_now(number, Part::Copies { snapshot, waits });
            }
            Command::Resume { .. } => {}
            Command::Step { .. } => self.copy(number, false),
            Command::Settle => self.copy(number, true),
            Command::Vote { .. } => {} // entered with the ballot, see `vote`
            Command::Commit { step } => self.commit(number, step),
            Command::Farewell { .. } => {
                self.nodes[number].is_done = true;
                self.enter_now(number, Part::Farewell);
            }
            Command::Pause => self.nodes[number].task = Task::Pausing,
            Command::Stop(Stop::UnitsLost) => {
                // Others may have continued without this member: it may return, with a new process.
                let promise = &self.promise;
                let is_promised = promise.holds() && promise.members.contains(&number);
                if is_promised && promise.committed.steps() > 0 && !promise.is_over {
                    self.break_rule("units were lost although the copies that were promised are left");
                }
                self.end(number);
            }
            Command::Close { standing } => {
                if let Some(standing) = standing {
                    self.ask_lighthouse(number, standing, false, setting);
                }
                self.promise.is_over = true;
                self.end(number);
            }
            Command::Stop(Stop::IslandLost { .. }) => self.lose_island(number),
            Command::Stop(_) => self.end(number),
            Command::Leave => {
                self.count_loss(number);
                self.end(number);
                self.nodes[number].die(number, setting);
            }
            Command::Follow { .. } | Command::Weigh => unreachable!("not in this job"),
        }
    }

    fn drop_group(&mut self, number: usize) {
        if let Some(epoch) = self.nodes[number].group.take() {
            self.groups.leave(epoch, number);
        }
    }

    fn ask(&mut self, number: usize, standing: Standing, is_intact: bool, setting: &Setting) {
        let node = &mut self.nodes[number];
        node.is_patient &= is_intact;
        node.task = Task::Asking;
        self.ask_lighthouse(number, standing, true, setting);
    }

    fn copy(&mut self, number: usize, is_last: bool) {
        let node = &mut self.nodes[number];
        node.is_patient = true;
        let epoch = node.group.expect("a step is taken in a group");
        node.task = Task::Copying { epoch, is_last };
    }

    pub(crate) fn enter_now(&mut self, number: usize, part: Part) {
        self.enter(number, Vec::new(), part);
    }

    fn enter(&mut self, number: usize, members: Vec<usize>, part: Part) {
        let epoch = self.nodes[number].group.expect("collectives are in a group");
        self.groups.enter(epoch, number, members, part);
        self.nodes[number].task = Task::Collective { epoch };
    }

    pub(crate) fn end(&mut self, number: usize) {
        self.drop_group(number);
        self.lighthouses.iter_mut().for_each(|lighthouse| _ = lighthouse.asking.remove(&number));
        self.groups.leave_all(number);
        self.nodes[number].life = Life::Gone;
        self.nodes[number].task = Task::Idle;
    }

    // ---- a step

    /// Whether the copies that this member keeps for others have arrived: those members have taken the step.
    pub(crate) fn copies_are_complete(&self, number: usize, keeper: Keeper) -> bool {
        let Task::Copying { epoch, .. } = self.nodes[number].task else { return false };
        let group = self.groups.get(epoch);
        let rank = previous(group.rank(number), group.members.len(), self.promise.island);
        let before = group.members[rank];
        let is_state_late = self.nodes[number].late | self.nodes[before].late != 0;
        if is_state_late && self.groups.can_fail(epoch, number, &self.nodes) {
            return false;
        }
        if self.nodes[number].planned.is_some() {
            return self.nodes[before].planned.as_ref().is_some_and(|planned| planned.epoch == epoch);
        }
        let is_due = self.nodes[number].is_due();
        keeper == Keeper::Replicas
            || (keeper == Keeper::SlowSnapshots && !is_due)
            || self.nodes[before].protocol.version() == self.nodes[number].protocol.version()
    }

    pub(crate) fn vote(&mut self, number: usize, is_whole: bool, setting: &Setting) {
        let Task::Copying { epoch, is_last } = self.nodes[number].task else {
            unreachable!("it has gradients")
        };
        if is_whole {
            self.nodes[number].late = 0;
        }
        if is_whole && self.nodes[number].planned.is_some() {
            self.receive_copies(number, setting);
        } else if is_whole {
            let group = self.groups.get(epoch);
            let (rank, size) = (group.rank(number), group.members.len());
            let node = &mut self.nodes[number];
            let now = Some((node.protocol.version(), node.content));
            let complete = match setting.keeper {
                Keeper::Replicas => None,
                Keeper::SlowSnapshots if !is_last => node.pace.under_way.filter(|_| node.is_due()),
                _ => now,
            };
            if let Some((version, content)) = complete {
                node.copies.push(node.active, version, content, 2);
                node.copies.push(kept(rank, size, units(setting), setting.island()), version, content, 2);
            }
        }
        if is_last {
            self.enter_now(number, Part::Settle { is_whole });
            return;
        }
        self.feed_vote(number, is_whole, setting);
    }

    fn feed_vote(&mut self, number: usize, is_whole: bool, setting: &Setting) {
        let (leaves, lag) = (self.nodes[number].leaves, self.lag(number, setting));
        let event = Event::Gradients { is_whole, leaves, lag };
        let commands = self.nodes[number].protocol.handle(event).expect("a step is in progress");
        let [Command::Vote { calls, .. }] = commands[..] else { unreachable!("a vote follows") };
        self.enter_now(number, Part::Vote { is_whole, leaves, calls });
    }

    fn take(&mut self, number: usize, vote: &Passed, is_recalled: bool, setting: &Setting) {
        self.settle_copies(number, setting);
        let node = &mut self.nodes[number];
        let tag = u8::try_from(vote.sums[0]).expect("a tag");
        node.content = node.content.after(tag);
        node.unreported |= 1 << step_of(vote.before);
        if setting.keeper == Keeper::Replicas {
            for versions in node.copies.0.values_mut() {
                let newest = versions.last_mut().expect("a replica has a version");
                if newest.0 == vote.before {
                    *newest = (vote.after, newest.1.after(tag));
                }
            }
        }
        let content = node.content;
        if setting.keeper == Keeper::SlowSnapshots && !is_recalled {
            self.copy_slowly(number);
        }
        if *self.given.entry(vote.after).or_insert(content) != content {
            self.break_rule("a version was given twice");
        }
        if setting.mistake == Some(Mistake::ReportedEarly) {
            self.commit(number, step_of(vote.before));
        }
    }

    fn commit(&mut self, number: usize, step: u64) {
        let node = &mut self.nodes[number];
        let committed = node.content.at(step + 1);
        if node.unreported & (1 << step) == 0 {
            self.break_rule("a member reported a step that it has not taken, or twice");
            return;
        }
        node.unreported &= !(1 << step);
        if !self.promise.committed.agrees_with(committed) {
            self.break_rule("a committed step was undone although the promised copies remain");
        } else if self.promise.committed.steps() <= step {
            self.promise.committed = committed;
        }
    }

    // ---- collectives

    pub(crate) fn complete(&mut self, number: usize, setting: &Setting) {
        let Task::Collective { epoch } = self.nodes[number].task else {
            unreachable!("it is in a collective")
        };
        let parts = self.groups.parts(epoch, number);
        if parts.iter().any(|part| std::mem::discriminant(part) != std::mem::discriminant(&parts[0])) {
            self.break_rule("members met in different collectives");
            return;
        }
        match &parts[0] {
            Part::Connect => self.feed(number, Event::Connected, setting),
            Part::Recall(_) => {
                let votes =
                    parts.into_iter().map(|part| if let Part::Recall(vote) = part { vote } else { None });
                let event = Event::Recalled { votes: votes.collect() };
                self.feed(number, event, setting);
            }
            Part::Compare(_) => {
                let sets =
                    parts.into_iter().map(|part| if let Part::Compare(set) = part { set } else { None });
                let event = Event::Compared { sets: sets.collect() };
                self.feed(number, event, setting);
            }
            Part::Survey { .. } => self.restore(number, &parts, setting),
            Part::Fetch => self.adopt(number, setting),
            Part::Copies { .. } => self.copied(number, &parts, setting),
            Part::Protect => self.protected(number, setting),
            Part::Vote { .. } => {
                let is_for = |part: &&Part| matches!(part, Part::Vote { is_whole: true, .. });
                let is_leaving = |part: &&Part| matches!(part, Part::Vote { leaves: true, .. });
                let leaving = parts.iter().filter(is_leaving).count();
                let saw_newcomer = |part: &&Part| matches!(part, Part::Vote { calls: true, .. });
                let newcomer_seen = parts.iter().filter(saw_newcomer).count();
                let is_skipped = setting.mistake == Some(Mistake::VoteSkipped);
                let votes = if is_skipped { parts.len() } else { parts.iter().filter(is_for).count() };
                if votes == parts.len() {
                    self.settle_copies(number, setting);
                }
                let tag = i64::from(self.groups.get(epoch).tag);
                self.feed(number, Event::Tally { votes, leaving, newcomer_seen, sums: vec![tag] }, setting);
            }
            Part::Settle { .. } => {
                let is_whole = parts.iter().all(|part| matches!(part, Part::Settle { is_whole: true }));
                self.feed(number, Event::Settled { is_whole }, setting);
            }
            Part::Farewell => self.feed(number, Event::Parted, setting),
        }
    }

    /// Restores by the plan of the recovery, from the parts of all members; members that need bytes fetch them in one
    /// more round.
    fn restore(&mut self, number: usize, parts: &[Part], setting: &Setting) {
        let count = units(setting);
        let (mut known, mut holdings) = (Vec::new(), Vec::new());
        for part in parts {
            let Part::Survey { knowledge, holdings: held } = part else { continue };
            known.push(*knowledge);
            holdings.push(expand(held, count));
        }
        let size = holdings.len();
        let needs: Vec<Vec<usize>> =
            (0..size).map(|rank| bits(trained(rank, size, count, setting.island()))).collect();
        let holdings = usable(&known, holdings);
        let plan = plan(&vec![1; count], &holdings, &needs).expect("a plan");
        let Some(version) = plan.version else {
            // Holders that are frozen, or have not left another group yet, may return within `rejoin_timeout`.
            let members = &self.groups.get(self.nodes[number].group.expect("in a group")).members;
            let is_elsewhere = |number: usize, node: &Node| {
                node.life == Life::Up && node.protocol.is_established() && !members.contains(&number)
            };
            let is_patient = self
                .nodes
                .iter()
                .enumerate()
                .any(|(number, node)| node.life == Life::Frozen || is_elsewhere(number, node));
            let event = if is_patient { Event::Missing } else { Event::Unrecoverable };
            self.feed(number, event, setting);
            return;
        };
        let found = holdings.iter().flatten().find(|holding| holding.version == version).expect("it is held");
        let node = &mut self.nodes[number];
        node.target = Some((version, Content::from_digest(found.digest)));
        self.enter_now(number, Part::Fetch);
    }

    fn adopt(&mut self, number: usize, setting: &Setting) {
        let epoch = self.nodes[number].group.expect("in a group");
        let group = self.groups.get(epoch);
        let active = trained(group.rank(number), group.members.len(), units(setting), setting.island());
        let (version, content) = self.nodes[number].target.take().expect("there is a plan");
        let node = &mut self.nodes[number];
        let had = if node.protocol.version() == version { node.active & !node.late } else { 0 };
        node.late = active & !had;
        if node.protocol.version() == version {
            // The member that receives these units may die before there are copies of them, so they are kept until
            // then.
            node.copies.push(had & !active, version, content, usize::MAX);
        }
        (node.content, node.active) = (content, active);
        self.feed(number, Event::Restored { version, is_stale: false }, setting);
    }
}

/// Experts, one for each initial member, and the shards of the rest of the model.
pub(crate) fn units(setting: &Setting) -> usize {
    setting.members + setting.island()
}

fn bits(units: u8) -> Vec<usize> {
    (0..8).filter(|unit| units & (1 << unit) != 0).collect()
}
