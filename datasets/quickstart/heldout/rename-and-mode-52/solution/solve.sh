#!/bin/bash
cd /app
mv lesi.md zomu.md && chmod 634 tepure.dat
