#!/bin/bash
cd /app
sed -i s/pefasu/laruku/ nipe_tageli.log
