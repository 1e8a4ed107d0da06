//! Lighthouses: questions, the sets that may be named, and delivery of answers.

use super::node::name;
use super::{Action, Life, Mistake, Node, Setting, Task, World};
use evermoe::protocol::{Event, Participant, Standing};
use std::collections::BTreeMap;

/// torchft's Lighthouse: it answers waiting members when all healthy members ask, or after some time when most do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Lighthouse {
    id: u64,
    previous: Vec<usize>,
    pub asking: BTreeMap<usize, Participant>,
}

impl World {
    /// The sets that the Lighthouses may name. Each waits for all healthy members, unless all of its last set ask, and
    /// may not know yet which have died. Healthy members arrive before its patience (`join_timeout`) ends.
    pub(super) fn answers(&self, found: &mut Vec<Action>) {
        for which in 0..self.lighthouses.len() {
            self.answers_of(which, found);
        }
    }

    fn answers_of(&self, which: usize, found: &mut Vec<Action>) {
        let lighthouse = &self.lighthouses[which];
        let asking: Vec<usize> = lighthouse.asking.keys().copied().collect();
        let sick = |number: usize| {
            let node = &self.nodes[number];
            node.life != Life::Up || node.task == Task::Withdrawn || node.lighthouse != which
        };
        let doubtful: u8 = asking.iter().filter(|&&number| sick(number)).map(|number| 1 << number).sum();
        let all_healthy_ask = (0..self.nodes.len()).all(|number| sick(number) || asking.contains(&number));
        for left_out in (0..=doubtful).filter(|mask| mask & !doubtful == 0) {
            let named: Vec<usize> =
                asking.iter().copied().filter(|number| left_out & (1 << number) == 0).collect();
            // If some members only look for newcomers, not all need arrive in time: then most of the healthy ones are
            // named.
            let seems_healthy = |number: &usize| !sick(*number) || named.contains(number);
            let healthy = (0..self.nodes.len()).filter(seems_healthy).count();
            let is_at_leisure =
                named.iter().any(|number| !lighthouse.asking[number].waits) && 2 * named.len() > healthy;
            let is_fast = !lighthouse.previous.is_empty()
                && lighthouse.previous.iter().all(|number| named.contains(number));
            // Newcomers to a job that is over wait for another one.
            let is_known = |number: &usize| self.nodes[*number].protocol.is_established();
            if self.promise.is_over && !named.iter().any(is_known) {
                continue;
            }
            if !named.is_empty() && (is_fast || all_healthy_ask || is_at_leisure) {
                found.push(Action::Answer(which, left_out));
            }
        }
    }

    pub(super) fn answer(&mut self, which: usize, left_out: u8) {
        let lighthouse = &mut self.lighthouses[which];
        let (named, others) = std::mem::take(&mut lighthouse.asking)
            .into_iter()
            .partition(|(number, _)| left_out & (1 << number) == 0);
        lighthouse.asking = others; // of a member whose heartbeat has stopped; it has its turn when it wakes up
        let named: BTreeMap<usize, Participant> = named;
        let numbers: Vec<usize> = named.keys().copied().collect();
        if numbers != lighthouse.previous {
            lighthouse.id += 1;
            lighthouse.previous.clone_from(&numbers);
        }
        let id = lighthouse.id;
        let participants: Vec<Participant> = named.into_values().collect();
        for (number, asked) in numbers.into_iter().zip(&participants) {
            let node = &mut self.nodes[number];
            if matches!(node.life, Life::Dead | Life::Gone) || node.lighthouse != which {
                continue;
            }
            if !asked.waits {
                node.overheard = Some((id, participants.clone()));
            } else if node.task == Task::Asking {
                node.task = Task::Answered { id, participants: participants.clone() };
            }
        }
    }

    pub(super) fn ask_lighthouse(
        &mut self,
        number: usize,
        standing: Standing,
        waits: bool,
        setting: &Setting,
    ) {
        let unreachable =
            (0..self.nodes.len()).filter(|&other| self.are_cut(number, other)).map(name).collect();
        let node = &self.nodes[number];
        let participant = Participant {
            id: name(number),
            rank_key: String::new(),
            island: setting.island_of(number),
            trains: true,
            waits,
            is_patient: node.is_patient,
            unreachable,
            standing,
        };
        self.lighthouses[node.lighthouse].asking.insert(number, participant);
    }

    pub(super) fn deliver(&mut self, number: usize, setting: &Setting) {
        let Task::Answered { mut id, mut participants } =
            std::mem::replace(&mut self.nodes[number].task, Task::Idle)
        else {
            unreachable!("only an answer is delivered");
        };
        self.overhear(number);
        if setting.mistake == Some(Mistake::GenerationNotRaised) {
            for participant in &mut participants {
                participant.standing.generation = participant.standing.generation.saturating_sub(1);
            }
        }
        if setting.mistake == Some(Mistake::LeaverCounts) {
            for last_group in
                participants.iter_mut().filter_map(|participant| participant.standing.last_group.as_mut())
            {
                last_group.leaves = false;
            }
        }
        if setting.mistake == Some(Mistake::SleepForgotten) {
            id = id.min(1 + participants.iter().map(|each| each.standing.adopted).max().unwrap_or(0));
        }
        self.feed(number, Event::Quorum { id, participants, is_promoted: false }, setting);
    }

    /// Delivers an earlier answer first.
    pub(super) fn overhear(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        if let Some((id, participants)) = node.overheard.take() {
            let commands = node
                .protocol
                .handle(Event::Overheard { id, participants, is_refused: false })
                .expect("at any time");
            assert!(commands.is_empty(), "nobody acts on what is overheard");
        }
    }
}

impl Node {
    /// Makes the member ask the next Lighthouse from now on; its last question stays at the current one.
    pub(super) fn move_on(&mut self, setting: &Setting) {
        self.lighthouse = (self.lighthouse + 1) % setting.lighthouses;
    }
}
