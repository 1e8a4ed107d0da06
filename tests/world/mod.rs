//! A job of a few members around a Lighthouse, small enough to explore. The protocol of each member and the planner of
//! recoveries are the product's own; the rest of the world (messages, copies, crashes) is a model.
//!
//! A collective completes on a member once all members of its group have entered it. It may fail as soon as one of them
//! has left, is frozen or is dead, even if that one had entered. Each member completes or fails independently.

mod copies;
mod group;
mod islands;
mod lighthouse;
mod node;
mod pace;
mod planned;
mod promise;

pub(crate) use copies::{Content, Keeper};
pub(crate) use node::{Life, Node, Task};
pub(crate) use promise::Promise;

use evermoe::protocol::{Event, step_of};
use group::Groups;
use lighthouse::Lighthouse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Settings of a run of the model.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// Members that start the job.
    pub members: usize,
    /// Number of processes in each island; none if there are no islands.
    pub island_size: Option<usize>,
    /// Processes that may join later.
    pub joiners: usize,
    /// Number of steps of the job.
    pub steps: u64,
    /// Whether newcomers are spares.
    pub has_spare: bool,
    /// Maximum number of crashes, freezes and incomplete ballots together.
    pub faults: u8,
    /// Number of Lighthouses, each of which names sets of the members that ask it.
    pub lighthouses: usize,
    /// Maximum number of unanswered questions.
    pub silences: u8,
    /// Maximum number of times that a member waiting for a majority asks another Lighthouse.
    pub moves: u8,
    /// Maximum number of background inquiries during training.
    pub inquiries: u8,
    /// Maximum number of members that leave the job on notice.
    pub leaves: u8,
    /// Maximum number of partitions between two members, both of which the Lighthouse hears.
    pub cuts: u8,
    /// Kind of copies.
    pub keeper: Keeper,
    /// A planted mistake of the driver, which the checker must find.
    pub mistake: Option<Mistake>,
}

/// Planted mistakes, to verify that they are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mistake {
    /// Ballots are ignored: a vote passes when all have cast one.
    VoteSkipped,
    /// A member sees generations that are one too small, and so does not raise its own.
    GenerationNotRaised,
    /// A step is reported as committed when it is taken.
    ReportedEarly,
    /// A member that wakes up receives the previous set number.
    SleepForgotten,
    /// Members continue without a majority although there are several Lighthouses.
    MinorityContinues,
    /// Previous copies are dropped when a recovery is over, not when the new copies are complete.
    GivenUpEarly,
    /// Steps count as committed before the copies that take several steps are complete.
    LagForgotten,
    /// Members do not report their islands.
    HalfIslands,
    /// A leaver counts as any other member while it is unknown whether it has left.
    LeaverCounts,
}

/// One state of the entire job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub nodes: Vec<Node>,
    pub groups: Groups,
    pub lighthouses: Vec<Lighthouse>,
    pub faults_left: u8,
    pub silences_left: u8,
    pub inquiries_left: u8,
    pub moves_left: u8,
    pub leaves_left: u8,
    pub cuts_left: u8,
    /// Pairs of members that do not reach each other, the lower number first.
    cuts: BTreeSet<(usize, usize)>,
    /// Whether a withdrawn member has asked again although others were out of its reach.
    has_come_in_vain: bool,
    /// The state that each version was given to.
    pub given: BTreeMap<u64, Content>,
    pub promise: Promise,
    /// The first rule that was broken.
    pub broken: Option<&'static str>,
}

impl Action {
    /// Whether it counts against one of the setting's limits on faults or silences.
    fn is_mishap(self) -> bool {
        matches!(
            self,
            Self::Crash(_)
                | Self::Freeze(_)
                | Self::VoteAgainst(_)
                | Self::VoteLeaving(_)
                | Self::Silence(_)
                | Self::Cut(..)
        )
    }
}

/// A possible next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Action {
    /// A process starts.
    Start(usize),
    /// A process dies with its node's memory.
    Crash(usize),
    /// A process stops without closing its sockets, and so does its heartbeat.
    Freeze(usize),
    Wake(usize),
    /// Two members can no longer reach each other.
    Cut(usize, usize),
    /// They reach each other again.
    Heal(usize, usize),
    /// A Lighthouse names the members that ask it, except these: bits of members that are dead or frozen.
    Answer(usize, u8),
    /// The answer reaches a member.
    Deliver(usize),
    /// The answer reaches a member that trains.
    Overhear(usize),
    /// The Lighthouse does not answer a member in time; the question stays with it.
    Silence(usize),
    /// A member has waited for others, or has withdrawn for long enough, and asks again.
    Waited(usize),
    /// A member has waited for a majority, and asks the next Lighthouse.
    Move(usize),
    /// A member's gradients and the copies that it keeps are complete, and it votes for the step.
    Vote(usize),
    /// They are incomplete, and it votes against the step.
    VoteAgainst(usize),
    /// They are complete; it votes for the step and leaves after it.
    VoteLeaving(usize),
    /// A member's collective completes.
    Complete(usize),
    /// A member's collective fails.
    Fail(usize),
}

impl World {
    pub(crate) fn new(setting: &Setting) -> Self {
        let total = setting.members + setting.joiners;
        let mut world = Self {
            nodes: (0..total).map(|number| Node::new(number, setting)).collect(),
            groups: Groups::default(),
            lighthouses: vec![Lighthouse::default(); setting.lighthouses],
            faults_left: setting.faults,
            silences_left: setting.silences,
            inquiries_left: setting.inquiries,
            moves_left: setting.moves,
            leaves_left: setting.leaves,
            cuts_left: setting.cuts,
            cuts: BTreeSet::new(),
            has_come_in_vain: false,
            given: BTreeMap::new(),
            promise: Promise { island: setting.island(), ..Promise::default() },
            broken: None,
        };
        for number in 0..setting.members {
            world.start(number, setting);
        }
        world
    }

    pub(crate) fn break_rule(&mut self, rule: &'static str) {
        self.broken = self.broken.or(Some(rule));
    }

    fn start(&mut self, number: usize, setting: &Setting) {
        self.nodes[number].life = Life::Up;
        self.feed(number, Event::Look { until: setting.steps }, setting);
    }

    /// All possible next actions.
    pub(crate) fn actions(&self, setting: &Setting, found: &mut Vec<Action>) {
        if self.broken.is_some() {
            return;
        }
        for (number, node) in self.nodes.iter().enumerate() {
            match node.life {
                Life::Absent => found.push(Action::Start(number)),
                Life::Frozen => found.push(Action::Wake(number)),
                Life::Up => self.own_actions(number, setting, found),
                Life::Dead | Life::Gone => {}
            }
        }
        self.answers(found);
        found.extend(self.cuts.iter().map(|&(a, b)| Action::Heal(a, b)));
        if self.cuts_left > 0 {
            let pairs = (0..self.nodes.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
            found.extend(pairs.filter(|pair| !self.cuts.contains(pair)).map(|(a, b)| Action::Cut(a, b)));
        }
    }

    pub(crate) fn are_cut(&self, one: usize, other: usize) -> bool {
        self.cuts.contains(&(one.min(other), one.max(other)))
    }

    fn is_cut(&self, number: usize) -> bool {
        (0..self.nodes.len()).any(|other| self.are_cut(number, other))
    }

    /// Whether a withdrawn member would only have to withdraw again: it does not reach all others, or one of them has
    /// finished and keeps asking.
    fn is_kept_out(&self, number: usize) -> bool {
        let is_at_the_end =
            |(other, node): (usize, &Node)| other != number && node.life == Life::Up && node.is_done;
        self.is_cut(number) || self.nodes.iter().enumerate().any(is_at_the_end)
    }

    fn own_actions(&self, number: usize, setting: &Setting, found: &mut Vec<Action>) {
        if self.faults_left > 0 {
            found.extend([Action::Crash(number), Action::Freeze(number)]);
        }
        if self.nodes[number].overheard.is_some() {
            found.push(Action::Overhear(number));
        }
        match &self.nodes[number].task {
            Task::Asking if self.silences_left > 0 => found.push(Action::Silence(number)),
            Task::Asking | Task::Idle => {}
            Task::Answered { .. } => found.push(Action::Deliver(number)),
            // A member that is kept out returns once in vain; returning more often would repeat the same without end.
            Task::Withdrawn if self.is_kept_out(number) && self.has_come_in_vain => {}
            Task::Waiting | Task::Withdrawn => {
                found.push(Action::Waited(number));
                if self.nodes[number].is_minority && self.moves_left > 0 {
                    found.push(Action::Move(number));
                }
            }
            Task::Pausing => {
                let others = || self.nodes.iter().enumerate().filter(|(other, _)| *other != number);
                let is_met = others().any(|(_, node)| node.life == Life::Up && node.task != Task::Pausing)
                    && !self.nodes[number].has_paused;
                let is_away = |node: &Node| {
                    let is_busy = matches!(
                        node.task,
                        Task::Copying { .. } | Task::Collective { .. } | Task::Answered { .. }
                    );
                    node.life == Life::Frozen || (node.life == Life::Up && is_busy)
                };
                if is_met || !others().any(|(_, node)| is_away(node)) {
                    found.push(Action::Waited(number));
                }
            }
            Task::Copying { epoch, is_last } => {
                if self.copies_are_complete(number, setting.keeper) {
                    found.push(Action::Vote(number));
                    if self.leaves_left > 0 && !is_last {
                        found.push(Action::VoteLeaving(number));
                    }
                }
                if self.faults_left > 0 {
                    found.push(Action::VoteAgainst(number));
                }
                if self.can_fail(*epoch, number) {
                    found.push(Action::Fail(number));
                }
            }
            Task::Collective { epoch, .. } => {
                let is_in_vain =
                    self.groups.is_connecting(*epoch, number) && self.is_cut_within(*epoch, number);
                if self.groups.is_complete(*epoch, number) && !is_in_vain {
                    found.push(Action::Complete(number));
                }
                if self.can_fail(*epoch, number) {
                    found.push(Action::Fail(number));
                }
            }
        }
    }

    fn can_fail(&self, epoch: u64, number: usize) -> bool {
        self.groups.can_fail(epoch, number, &self.nodes) || self.is_cut_within(epoch, number)
    }

    /// Whether a member cannot reach another one of its group.
    fn is_cut_within(&self, epoch: u64, number: usize) -> bool {
        self.groups.get(epoch).members.iter().any(|&other| self.are_cut(number, other))
    }

    /// The world after an action.
    pub(crate) fn after(&self, action: Action, setting: &Setting) -> Self {
        let mut world = self.clone();
        match action {
            Action::Start(number) => world.start(number, setting),
            Action::Crash(number) => world.crash(number, setting),
            Action::Freeze(number) => world.freeze(number),
            Action::Wake(number) => {
                world.nodes[number].life = Life::Up;
                world.nodes.iter_mut().for_each(|node| node.has_paused = false);
            }
            Action::Cut(one, other) => {
                world.cuts_left -= 1;
                world.cuts.insert((one, other));
                // One of them withdraws, with all its state.
                for number in [one, other] {
                    world.nodes[number].was_away = true;
                }
                world.count_loss(if world.promise.members.contains(&one) { one } else { other });
            }
            Action::Heal(one, other) => {
                world.cuts.remove(&(one, other));
            }
            Action::Answer(which, left_out) => world.answer(which, left_out),
            Action::Deliver(number) => world.deliver(number, setting),
            Action::Overhear(number) => world.overhear(number),
            Action::Silence(number) => {
                world.silences_left -= 1;
                world.nodes[number].move_on(setting);
                world.feed(number, Event::Unanswered { reason: "silence".into(), refused: None }, setting);
            }
            Action::Waited(number) => {
                world.has_come_in_vain |=
                    world.nodes[number].task == Task::Withdrawn && world.is_kept_out(number);
                world.nodes[number].is_patient = false;
                let is_pausing = world.nodes[number].task == Task::Pausing;
                world.nodes[number].has_paused |= is_pausing;
                let event = if is_pausing { Event::Look { until: setting.steps } } else { Event::Waited };
                world.feed(number, event, setting);
            }
            Action::Move(number) => {
                world.moves_left -= 1;
                world.nodes[number].move_on(setting);
                world.feed(number, Event::Waited, setting);
            }
            Action::Vote(number) => world.vote(number, true, setting),
            Action::VoteLeaving(number) => {
                world.leaves_left -= 1;
                world.nodes[number].leaves = true;
                world.vote(number, true, setting);
            }
            Action::VoteAgainst(number) => {
                world.faults_left -= 1;
                world.vote(number, false, setting);
            }
            Action::Complete(number) => world.complete(number, setting),
            Action::Fail(number) => world.feed(number, Event::Lost { reason: "lost".into() }, setting),
        }
        world.groups.forget_old(&world.nodes);
        if world.groups.made() + 1 >= copies::MAX_GROUPS {
            world.break_rule("groups are made without end");
        }
        world
    }

    fn crash(&mut self, number: usize, setting: &Setting) {
        self.faults_left -= 1;
        self.count_loss(number);
        self.groups.leave_all(number);
        self.nodes[number].die(number, setting);
    }

    fn freeze(&mut self, number: usize) {
        self.faults_left -= 1;
        self.count_loss(number);
        self.nodes[number].life = Life::Frozen;
        self.nodes[number].was_away = true;
    }

    /// Whether the job finishes if nothing else fails and all members get their turn.
    pub(crate) fn finishes(&self, setting: &Setting) -> bool {
        let mut world = self.clone();
        world.moves_left = if setting.lighthouses > 1 { u8::MAX } else { 0 };
        let mut taken: HashMap<Action, u32> = HashMap::new();
        for _ in 0..2000 {
            let mut possible = Vec::new();
            world.actions(setting, &mut possible);
            possible.retain(|action| {
                let is_change = matches!(action, Action::Start(_) | Action::Wake(_) | Action::Heal(..));
                let is_early = matches!(action, Action::Waited(number) if world.is_kept_out(*number)
                    && world.nodes[*number].task == Task::Withdrawn);
                !action.is_mishap() && !is_change && !is_early && !world.is_out_of_turn(*action)
            });
            // Members that can continue do so; only then does a wait end. The Lighthouse receives nothing from dead and
            // frozen ones.
            possible.sort_by_key(|action| match action {
                Action::Fail(_) => 1,
                // A withdrawn member stays away for longer than the Lighthouse takes to name the others.
                Action::Waited(number) if world.nodes[*number].task == Task::Withdrawn => u32::MAX,
                Action::Waited(number) if world.nodes[*number].is_minority => u32::MAX,
                // A member with missing units waits as long as their holders take to return.
                Action::Waited(number) if world.nodes[*number].task == Task::Pausing => u32::MAX,
                Action::Waited(_) => 2,
                Action::Move(_) => 3,
                Action::Answer(_, left_out) => 4 + u32::from(u8::MAX - left_out),
                _ => 0,
            });
            let Some(first) = possible.first() else { break };
            let rank = std::mem::discriminant(first);
            let equal: Vec<Action> =
                possible.iter().copied().filter(|action| std::mem::discriminant(action) == rank).collect();
            let is_answer = matches!(first, Action::Answer(..));
            let rarest = *equal.iter().min_by_key(|action| taken.get(action)).expect("the first is one");
            let action = if is_answer { *first } else { rarest };
            *taken.entry(action).or_insert(0) += 1;
            world = world.after(action, setting);
        }
        // Left over are newcomers to a finished job, which wait for another one, and a minority that others continued
        // without.
        let is_left = |(number, node): (usize, &Node)| {
            let is_behind = node.is_minority && !world.promise.members.contains(&number);
            let is_in = node.protocol.is_established() && node.task != Task::Withdrawn && !is_behind;
            node.life == Life::Up && is_in
        };
        world.broken.is_none() && !world.nodes.iter().enumerate().any(is_left) && world.promise.is_over
    }

    /// Whether members that look for each other would never meet if all moved at once: the first one stays.
    fn is_out_of_turn(&self, action: Action) -> bool {
        let is_looking = |node: &Node| {
            let is_asking = matches!(node.task, Task::Waiting | Task::Asking | Task::Answered { .. });
            node.life == Life::Up && node.is_minority && is_asking
        };
        let mut looking = (0..self.nodes.len()).filter(|&number| is_looking(&self.nodes[number]));
        let first = looking.next();
        let stays = first.filter(|_| looking.next().is_some()); // a single one looks for those that continue
        match action {
            Action::Move(number) => stays == Some(number),
            Action::Waited(number) => {
                self.nodes[number].is_minority && self.lighthouses.len() > 1 && stays != Some(number)
            }
            _ => false,
        }
    }

    /// Whether every member that can has finished.
    pub(crate) fn is_finished(&self) -> bool {
        self.nodes
            .iter()
            .all(|node| matches!(node.life, Life::Gone | Life::Dead | Life::Absent | Life::Frozen))
    }

    /// Number of steps reported as committed.
    pub(crate) fn committed_steps(&self) -> u64 {
        self.promise.committed.steps()
    }

    /// Whether no two members have different states, or copies of them, under one version.
    pub(crate) fn states_agree(&self) -> bool {
        let mut known: BTreeMap<u64, Content> = BTreeMap::new();
        let held = self.nodes.iter().filter(|node| node.life != Life::Absent).flat_map(Node::held);
        held.filter(|(version, _)| step_of(*version) > 0)
            .all(|(version, content)| *known.entry(version).or_insert(content) == content)
    }
}
